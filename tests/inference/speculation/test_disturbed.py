"""Every selector where chains and trees take turns at being best, and where measurements are lost
or come late."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import pytest

from bench.selector_regret import simulate
from bench.simulators import Drafted, Simulator, by_rates
from slipstream.inference.speculation.bandits import (
    BanditSelector,
    EpsilonGreedy,
    Rule,
    UpperConfidenceBound,
    buckets_by_rows,
)
from slipstream.inference.speculation.plan import OFF, DraftPlan
from slipstream.inference.speculation.selector import (
    CostModelSelector,
    HasMinAcceptance,
    StepRecord,
    StrategySelector,
)

CHAIN, TREE = DraftPlan.chain(5), DraftPlan(4, 4, 12)
PLANS = [OFF, DraftPlan.chain(1), CHAIN, TREE]
SIX_ROWS = [CHAIN, DraftPlan(2, 3, 6), DraftPlan(4, 2, 6)]
"""BEG chooses among plans of one number of rows."""

RATES = [0.6] * 5
PHASE = 1200


def seconds(step: int, running: int, drafted: Drafted) -> float:
    rows = running * (1 + drafted.drafts)
    return 4e-3 + 3e-5 * rows + (2e-4 + 2e-4 * drafted.passes if drafted.passes else 0.0)


def made(name: str, seed: int) -> StrategySelector:
    rules: dict[str, Rule] = {"EG": EpsilonGreedy(0.1), "UCB1": UpperConfidenceBound()}
    if name == "cost":
        return CostModelSelector(PLANS)
    if name == "BEG":
        buckets = buckets_by_rows(SIX_ROWS, [1])
        return BanditSelector(buckets, EpsilonGreedy(0.1), window=40, seed=seed)
    return BanditSelector({1: PLANS}, rules[name], window=40, seed=seed)


class Disturbed:
    """Passes on what it is told: all but a share that is `lost`, and so many choices late."""

    def __init__(
        self, selector: StrategySelector, lost: float = 0.0, late: int = 0, seed: int = 0
    ) -> None:
        self._selector, self._lost, self._late = selector, lost, late
        self._rng = random.Random(seed)
        self._waiting: deque[StepRecord] = deque()
        self.chosen: list[tuple[DraftPlan, float]] = []
        """With what a draft had to be worth."""

    def begin_rollout(self, requests: int) -> int:
        return self._selector.begin_rollout(requests)

    def select(self, running: int) -> DraftPlan:
        plan = self._selector.select(running)
        self.chosen.append((plan, self.min_acceptance(running)))
        return plan

    def min_acceptance(self, running: int) -> float:
        return (
            self._selector.min_acceptance(running)
            if isinstance(self._selector, HasMinAcceptance)
            else 0.0
        )

    def record(self, step: StepRecord) -> None:
        if self._rng.random() >= self._lost:
            self._waiting.append(step)
        if len(self._waiting) > self._late:
            self._selector.record(self._waiting.popleft())

    def changed(self, *, drafter: bool = False) -> None:
        self._selector.changed(drafter=drafter)


def share_of_the_best(world: Simulator, watched: Disturbed, steps: range) -> float:
    """Of the speed of the plans that are best at the steps' batch sizes."""
    took = best = 0.0
    for step in steps:
        plan, worth = watched.chosen[step]
        drafted = world.drafted(step, world.sizes[step], plan, worth)
        took += world.seconds(step, world.sizes[step], drafted)
        best += drafted.made / max(world.rate(step, plan) for plan in world.plans)
    return best / took


def world_of(name: str, sizes: list[int], second: Callable[[int], float]) -> Simulator:
    plans = SIX_ROWS if name == "BEG" else PLANS
    return Simulator(sizes, seconds, by_rates(lambda _, __: RATES, second), plans)


@pytest.mark.parametrize(
    ("name", "least"), [("cost", 0.96), ("EG", 0.93), ("UCB1", 0.95), ("BEG", 0.93)]
)
def test_what_siblings_are_worth_changes(name: str, least: float) -> None:
    world = world_of(name, [4] * 3 * PHASE, lambda step: 0.0 if step // PHASE == 1 else 1.0)
    tree = SIX_ROWS[1] if name == "BEG" else TREE
    # Whoever does not follow is found out.
    assert world.rate(0, CHAIN) < 0.94 * world.rate(0, tree)
    assert world.rate(PHASE, tree) < 0.94 * world.rate(PHASE, CHAIN)
    for seed in range(2):
        watched = Disturbed(made(name, seed))
        simulate(world, watched, seed)
        # A window of what a plan earned does not fade: UCB1 has tried all plans as often as it
        # remembers, and never comes back to one that was worse.
        for phase in range(2 if name == "UCB1" else 3):
            steps = range((phase + 1) * PHASE - 300, (phase + 1) * PHASE)
            assert share_of_the_best(world, watched, steps) > least, (phase, seed)


@pytest.mark.parametrize(("lost", "late"), [(0.5, 0), (0.9, 0), (0.0, 1), (0.0, 25), (0.5, 8)])
@pytest.mark.parametrize("name", ["cost", "EG", "UCB1", "BEG"])
def test_measurements_are_lost_or_come_late(name: str, lost: float, late: int) -> None:
    # Batch sizes come and go while steps of others are still to be told.
    sizes = [n for _ in range(200) for n in (4, 4, 4, 4, 4, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1)]
    world = world_of(name, sizes, lambda step: 1.0)
    watched = Disturbed(made(name, 0), lost, late)
    simulate(world, watched, 0)
    share = share_of_the_best(world, watched, range(2000, 3000))
    # Each plan of each batch size is tried a hundred times by UCB1, of what it is told.
    assert share > (0.75 if name == "UCB1" else 0.88 if lost > 0.5 else 0.93)
    if name != "BEG":
        assert max(world.rate(2000, plan) for plan in PLANS[:-1]) < 0.94 * world.rate(2000, TREE)


@pytest.mark.parametrize(("name", "plan"), [("cost", OFF), ("EG", OFF), ("BEG", CHAIN)])
def test_who_is_told_nothing_stays_with_the_first_plan(name: str, plan: DraftPlan) -> None:
    watched = Disturbed(made(name, 0), lost=1.0)
    simulate(world_of(name, [4, 2] * 50, lambda step: 1.0), watched, 0)
    assert {chosen for chosen, _ in watched.chosen} == {plan}


def test_steps_told_late_do_not_spoil_what_is_known_of_plans() -> None:
    sizes = [n for _ in range(150) for n in (4,) * 10 + (1,) * 10]
    world = world_of("cost", sizes, lambda step: 1.0)
    for late in (0, 10):
        selector = CostModelSelector(PLANS)
        simulate(world, Disturbed(selector, late=late), 1)
        # With ten steps' delay each is told of while the other size runs.
        for running, step in ((4, 0), (1, 10)):
            whole = world.drafted(step, running, TREE, 0.0)
            believed = selector._costs.seconds(running, TREE, running, whole.drafts)
            assert believed == pytest.approx(seconds(0, running, whole), rel=0.1)
