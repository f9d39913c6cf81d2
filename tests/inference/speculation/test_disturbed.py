"""Tests of all selectors with a best plan that changes, and with lost or late step records."""

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
SIX_TOKENS = [CHAIN, DraftPlan(2, 3, 6), DraftPlan(4, 2, 6)]
"""BEG chooses among plans with the same `verify_tokens`."""

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
        buckets = buckets_by_rows(SIX_TOKENS, [1])
        return BanditSelector(buckets, EpsilonGreedy(0.1), window=40, seed=seed)
    return BanditSelector({1: PLANS}, rules[name], window=40, seed=seed)


class Disturbed:
    """Loses a share `lost` of the records and passes on the others `late` steps later."""

    def __init__(
        self, selector: StrategySelector, lost: float = 0.0, late: int = 0, seed: int = 0
    ) -> None:
        self._selector, self._lost, self._late = selector, lost, late
        self._rng = random.Random(seed)
        self._held: deque[StepRecord] = deque()
        self.chosen: list[tuple[DraftPlan, float]] = []
        """Plans, each with its min acceptance probability."""

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
            self._held.append(step)
        if len(self._held) > self._late:
            self._selector.record(self._held.popleft())

    def changed(self, *, drafter: bool = False) -> None:
        self._selector.changed(drafter=drafter)


def relative_speed(simulator: Simulator, watched: Disturbed, steps: range) -> float:
    """Speed of the chosen plans over that of the best plan at each step."""
    took = best = 0.0
    for step in steps:
        plan, least = watched.chosen[step]
        drafted = simulator.drafted(step, simulator.sizes[step], plan, least)
        took += simulator.seconds(step, simulator.sizes[step], drafted)
        best += drafted.made / max(simulator.rate(step, plan) for plan in simulator.plans)
    return best / took


def simulator_of(name: str, sizes: list[int], second: Callable[[int], float]) -> Simulator:
    plans = SIX_TOKENS if name == "BEG" else PLANS
    return Simulator(sizes, seconds, by_rates(lambda _, __: RATES, second), plans)


@pytest.mark.parametrize(
    ("name", "least"), [("cost", 0.96), ("EG", 0.93), ("UCB1", 0.95), ("BEG", 0.93)]
)
def test_a_changed_acceptance_of_siblings_is_followed(name: str, least: float) -> None:
    simulator = simulator_of(name, [4] * 3 * PHASE, lambda step: 0.0 if step // PHASE == 1 else 1.0)
    tree = SIX_TOKENS[1] if name == "BEG" else TREE
    # A selector that stays with one plan fails.
    assert simulator.rate(0, CHAIN) < 0.94 * simulator.rate(0, tree)
    assert simulator.rate(PHASE, tree) < 0.94 * simulator.rate(PHASE, CHAIN)
    for seed in range(2):
        watched = Disturbed(made(name, seed))
        simulate(simulator, watched, seed)
        # A window of rewards does not fade: once it is full, UCB1 never returns to a plan that was
        # worse.
        for phase in range(2 if name == "UCB1" else 3):
            steps = range((phase + 1) * PHASE - 300, (phase + 1) * PHASE)
            assert relative_speed(simulator, watched, steps) > least, (phase, seed)


@pytest.mark.parametrize(("lost", "late"), [(0.5, 0), (0.9, 0), (0.0, 1), (0.0, 25), (0.5, 8)])
@pytest.mark.parametrize("name", ["cost", "EG", "UCB1", "BEG"])
def test_plans_are_good_with_lost_or_late_records(name: str, lost: float, late: int) -> None:
    # Batch sizes change while records of earlier ones are still missing.
    sizes = [n for _ in range(200) for n in (4, 4, 4, 4, 4, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1)]
    simulator = simulator_of(name, sizes, lambda step: 1.0)
    watched = Disturbed(made(name, 0), lost, late)
    simulate(simulator, watched, 0)
    share = relative_speed(simulator, watched, range(2000, 3000))
    # UCB1 tries each plan of each batch size a hundred times, counted by records.
    assert share > (0.75 if name == "UCB1" else 0.88 if lost > 0.5 else 0.93)
    if name != "BEG":
        assert max(simulator.rate(2000, plan) for plan in PLANS[:-1]) < 0.94 * simulator.rate(
            2000, TREE
        )


@pytest.mark.parametrize(("name", "plan"), [("cost", OFF), ("EG", OFF), ("BEG", CHAIN)])
def test_a_selector_without_records_stays_with_the_first_plan(name: str, plan: DraftPlan) -> None:
    watched = Disturbed(made(name, 0), lost=1.0)
    simulate(simulator_of(name, [4, 2] * 50, lambda step: 1.0), watched, 0)
    assert {chosen for chosen, _ in watched.chosen} == {plan}


def test_late_records_do_not_distort_predicted_costs() -> None:
    sizes = [n for _ in range(150) for n in (4,) * 10 + (1,) * 10]
    simulator = simulator_of("cost", sizes, lambda step: 1.0)
    for late in (0, 10):
        selector = CostModelSelector(PLANS)
        simulate(simulator, Disturbed(selector, late=late), 1)
        # With a delay of ten steps, records arrive while the other size runs.
        for running, step in ((4, 0), (1, 10)):
            whole = simulator.drafted(step, running, TREE, 0.0)
            predicted = selector._costs.seconds(running, TREE, running, whole.drafts)
            assert predicted == pytest.approx(seconds(0, running, whole), rel=0.1)
