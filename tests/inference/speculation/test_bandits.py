"""FastRL's bandits: their choices from known rewards and on recorded steps."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest

from bench.selector_regret import simulate
from bench.simulators import Drafted, Simulator, by_rates
from slipstream.errors import ConfigError
from slipstream.inference.speculation.bandits import (
    BanditSelector,
    EpsilonGreedy,
    Rule,
    UpperConfidenceBound,
    buckets_by_rows,
)
from slipstream.inference.speculation.plan import OFF, DraftPlan
from slipstream.inference.speculation.report import ReportedSelector, replay
from slipstream.inference.speculation.selector import StepRecord

ONE, THREE, FIVE = (DraftPlan.chain(drafts) for drafts in (1, 3, 5))
GREEDY = EpsilonGreedy(0.0)


def step(
    plan: DraftPlan, tokens: int, *, seconds: float = 1.0, running: int = 1, steady: bool = True
) -> StepRecord:
    """A step in which each request got `tokens` tokens."""
    return StepRecord(
        running=running,
        plan=plan,
        seconds=seconds,
        drafted=[plan.steps] * running,
        accepted=[tokens - 1] * running,
        steady=steady,
    )


def bandit(*plans: DraftPlan, rule: Rule = GREEDY, window: int = 300) -> BanditSelector:
    return BanditSelector({1: plans}, rule, window=window)


def test_each_plan_is_tried_first() -> None:
    made = bandit(ONE, THREE, FIVE)
    for plan, tokens in ((ONE, 2), (THREE, 4), (FIVE, 3)):
        assert made.select(1) == plan
        made.record(step(plan, tokens))
    assert made.select(1) == THREE
    # Nothing is known at another batch size.
    assert made.select(2) == ONE


def test_rewards_are_tokens_per_second_of_all_requests() -> None:
    made = bandit(ONE, THREE)
    made.record(step(ONE, 2, seconds=0.010, running=3))
    made.record(step(THREE, 3, seconds=0.016, running=3))
    assert made.select(3) == ONE
    assert [list(r) for r in made._earned[3].values()] == [[600.0], [562.5]]


def test_the_median_of_the_last_steps_decides() -> None:
    made = bandit(ONE, THREE, window=3)
    for tokens in (9, 2, 2, 2):
        made.record(step(ONE, tokens))
    for tokens in (1, 3, 3, 90):
        made.record(step(THREE, tokens))
    assert made.select(1) == THREE
    # One lucky step does not change the median; two of three do.
    made.record(step(ONE, 50))
    assert made.select(1) == THREE
    made.record(step(ONE, 50))
    assert made.select(1) == ONE


def test_steps_with_extra_work_give_no_reward() -> None:
    made = bandit(ONE, THREE)
    made.record(step(ONE, 2))
    made.record(step(THREE, 4, seconds=9.0, steady=False))
    assert made.select(1) == THREE
    made.record(step(THREE, 4))
    assert made.select(1) == THREE


def test_epsilon_is_the_share_of_random_plans() -> None:
    earned = {ONE: [1.0], THREE: [5.0], FIVE: [3.0]}
    rng = random.Random(3)
    chosen = Counter(EpsilonGreedy(0.3).pick(earned, rng) for _ in range(3000))
    # A third of the random choices is the best plan.
    assert chosen[THREE] / 3000 == pytest.approx(0.8, abs=0.02)
    assert chosen[ONE] / 3000 == pytest.approx(0.1, abs=0.02)
    again = random.Random(3)
    assert Counter(EpsilonGreedy(0.3).pick(earned, again) for _ in range(3000)) == chosen


def test_upper_bounds_of_a_small_example() -> None:
    """2 ln 6 = 3.58: with 0.8 of the best mean after two tries, 0.8 + 1.34 beats 1 + 0.95."""
    rng = random.Random(0)
    rule = UpperConfidenceBound()
    few, many = [8000.0] * 2, [10000.0] * 4
    assert rule.pick({ONE: few, THREE: many}, rng) == ONE
    assert rule.pick({ONE: [5000.0] * 2, THREE: many}, rng) == THREE
    # The same in other units: rewards are relative.
    assert rule.pick({ONE: [0.8] * 2, THREE: [1.0] * 4}, rng) == ONE


def test_upper_bounds_ignore_outliers() -> None:
    rewards = [10.0] * 18 + [0.01, 1000.0]
    assert UpperConfidenceBound().pick({ONE: [11.0] * 20, THREE: rewards}, random.Random(0)) == ONE


def test_larger_trees_serve_smaller_batches() -> None:
    two = DraftPlan(2, 2, 4)
    buckets = buckets_by_rows([ONE, FIVE, THREE, two], [1, 4, 9])
    assert buckets == {1: [FIVE], 4: [THREE, two], 9: [ONE]}
    made = BanditSelector(buckets, GREEDY, bs_threshold=12)
    assert [made.select(n) for n in (1, 3, 4, 8, 9, 12, 13)] == [
        *(FIVE, FIVE, THREE, THREE, ONE, ONE, OFF)
    ]
    made.record(step(THREE, 2, running=4))
    assert made.select(4) == two
    made.record(step(two, 3, running=4))
    assert made.select(4) == two
    assert made.table() == "5_1_6, from 4 on 3_1_4 2_2_4, from 9 on 1_1_2"


@pytest.mark.parametrize(
    ("thresholds", "message"),
    [
        ([1, 2], "2 thresholds .1, 2. .* verify_tokens 6, 4, 2: set 3 thresholds"),
        ([2, 4, 8], "must start at 1 and increase"),
        ([1, 4, 4], "must start at 1 and increase"),
    ],
)
def test_invalid_thresholds_are_errors(thresholds: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        buckets_by_rows([ONE, THREE, FIVE], thresholds)


def test_invalid_settings_are_errors() -> None:
    with pytest.raises(ConfigError, match=r"epsilon=1\.5"):
        EpsilonGreedy(1.5)
    with pytest.raises(ConfigError, match="window=0"):
        bandit(ONE, window=0)
    with pytest.raises(ConfigError, match="must start at 1 running request"):
        BanditSelector({2: [ONE]}, GREEDY)
    with pytest.raises(ConfigError, match="starts at 4 running requests has no plan"):
        BanditSelector({1: [ONE], 4: []}, GREEDY)


def test_new_weights_keep_the_newest_half_of_the_rewards() -> None:
    made = bandit(ONE, THREE)
    for tokens in (5, 5, 5, 2, 2):
        made.record(step(ONE, tokens))
    made.record(step(THREE, 3))
    assert made.select(1) == ONE
    made.changed(drafter=True)
    assert [list(r) for r in made._earned[1].values()] == [[5.0, 2.0, 2.0], [3.0]]
    assert made.select(1) == THREE


def test_drafts_that_become_useless_are_abandoned() -> None:
    """The best plan changes after 1,000 steps at one batch size."""

    def seconds(number: int, running: int, drafted: Drafted) -> float:
        return 1.0 + 0.1 * drafted.drafts

    def rates(number: int, running: int) -> list[float]:
        return [0.9 if number < 1000 else 0.05] * 5

    simulator = Simulator([4] * 3000, seconds, by_rates(rates), [OFF, ONE, FIVE])
    for rule in (EpsilonGreedy(0.1), UpperConfidenceBound()):
        made = BanditSelector({1: [OFF, ONE, FIVE]}, rule, window=100)
        regret = simulate(simulator, made, 0)
        assert 0 < regret.clairvoyant < 0.1
        chosen = Counter(_chosen(made, 200))
        assert chosen[OFF] > 100


def _chosen(made: BanditSelector, times: int) -> list[DraftPlan]:
    return [made.select(4) for _ in range(times)]


def test_a_trace_is_replayed_to_the_same_plans() -> None:
    def make() -> BanditSelector:
        return BanditSelector({1: [OFF, ONE, THREE]}, EpsilonGreedy(0.2), seed=5)

    lines: list[str] = []
    reported = ReportedSelector(make(), notify=lines.append, trace=lines.append)
    rng = random.Random(1)
    for number in range(300):
        running = 1 + number % 3
        plan = reported.select(running)
        accepted = [rng.randint(0, plan.steps) for _ in range(running)] if plan.steps else []
        reported.record(
            StepRecord(
                running=running,
                plan=plan,
                seconds=1 + 0.2 * plan.steps + rng.random(),
                drafted=[plan.steps] * len(accepted),
                accepted=accepted,
                steady=number % 7 != 0,
            )
        )
        if number == 150:
            reported.changed(drafter=True)
    pairs = replay([line for line in lines if _is_event(line)], make)
    assert len(pairs) == 300
    assert len({plan for _, plan in pairs}) == 3
    assert all(chosen == recorded for chosen, recorded in pairs)


def _is_event(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False
