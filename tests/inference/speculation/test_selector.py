"""The cost model selector on simulated machines whose best plan is known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from itertools import groupby, pairwise
from statistics import mean

import pytest

from slipstream.errors import ConfigError
from slipstream.inference.speculation.plan import OFF, DraftPlan
from slipstream.inference.speculation.selector import (
    CostModelSelector,
    PredefinedSelector,
    StepRecord,
    StrategySelector,
    bucket_of,
)

PLANS = [DraftPlan.chain(n) for n in (1, 2, 3, 4, 6)]
Cost = Callable[[int, int], float]
"""Seconds of a step by running requests and drafts."""


def cpu(running: int, drafts: int) -> float:
    """Seconds of about two CPU cores: tokens cost, and each draft costs a little more."""
    milliseconds = 4.0 + 0.2 * running * (drafts + 1) + (0.5 + 0.35 * drafts if drafts else 0.0)
    return 1e-3 * milliseconds


def simulate(
    selector: StrategySelector,
    sizes: list[int],
    *,
    acceptance: Callable[[int], float] = lambda step: 0.7,
    cost: Cost = cpu,
    noise: float = 0.05,
    seed: int = 0,
) -> tuple[float, float, list[DraftPlan]]:
    """Run steps of these batch sizes. Returns seconds, seconds of plain decoding for the same
    number of tokens, and plans."""
    rng = random.Random(seed)
    seconds = plain = 0.0
    plans, before = [], OFF
    for step, running in enumerate(sizes):
        plan = selector.select(running)
        took = cost(running, plan.steps) * (1 + noise * rng.gauss(0, 1))
        if rng.random() < 0.01:
            took *= 5  # another program ran
        drafted = [plan.steps] * running if plan.steps else []
        accepted = []
        for drafts in drafted:
            correct = 0
            while correct < drafts and rng.random() < acceptance(step):
                correct += 1
            accepted.append(correct)
        steady = not (plan != OFF and before == OFF)
        record = StepRecord(
            running=running,
            plan=plan,
            seconds=took,
            drafted=drafted,
            accepted=accepted,
            steady=steady,
        )
        selector.record(record)
        seconds += cost(running, plan.steps)
        plain += cost(running, 0) * (1 + sum(accepted) / running)
        plans.append(plan)
        before = plan
    return seconds, plain, plans


def expected_rate(running: int, drafts: int, p: float, cost: Cost = cpu) -> float:
    return running * sum(p**depth for depth in range(drafts + 1)) / cost(running, drafts)


def made(running: int, plan: DraftPlan, p: float = 0.7) -> float:
    """Tokens per request of a step."""
    return expected_rate(running, plan.steps, p) * cpu(running, plan.steps) / running


def best_rate(running: int, p: float, cost: Cost = cpu) -> float:
    return max(expected_rate(running, plan.steps, p, cost) for plan in [OFF, *PLANS])


@pytest.mark.parametrize("running", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("p", [0.05, 0.5, 0.85])
def test_within_five_percent_of_the_best_plan_in_hindsight(running: int, p: float) -> None:
    rates = []
    for seed in range(0, 16, 2):
        selector = CostModelSelector(PLANS)
        simulate(selector, [running] * 60, acceptance=lambda _: p, seed=seed)
        sizes = [running] * 400
        _, _, plans = simulate(selector, sizes, acceptance=lambda _: p, seed=seed + 1)
        # Expected rate of the chosen plans.
        seconds = [cpu(running, plan.steps) for plan in plans]
        tokens = sum(
            expected_rate(running, plan.steps, p) * took
            for plan, took in zip(plans, seconds, strict=True)
        )
        rates.append(tokens / sum(seconds))
    assert mean(rates) > 0.95 * best_rate(running, p)
    # In one of many runs, noise spoils the first probes, so it stays without drafts for long.
    unlucky, *others = sorted(rates)
    assert min(others) > 0.9 * best_rate(running, p)
    assert unlucky > 0.8 * best_rate(running, p)


def test_cheap_probes_come_first() -> None:
    # Seven tokens of each of 64 requests cost five times as much as one.
    for seed in range(4):
        selector = CostModelSelector(PLANS)
        _, _, plans = simulate(selector, [64] * 80, acceptance=lambda _: 0.9, seed=seed)
        tried = list(dict.fromkeys(plan.steps for plan in plans))
        assert tried == sorted(tried)


def test_a_shrinking_batch_gains_in_the_tail_and_is_never_much_slower_than_plain_decoding() -> None:
    sizes = [64 - i // 4 for i in range(240)] + [4] * 100 + [2] * 100 + [1] * 200
    selector = CostModelSelector(PLANS)
    for seed in range(3):
        seconds, plain, plans = simulate(selector, sizes, seed=seed)
        oracle = sum(
            n / best_rate(n, 0.7) * made(n, plan) for n, plan in zip(sizes, plans, strict=True)
        )
        # Each size has few steps: the first rollout pays for all probes.
        assert seconds < (1.05 if seed else 1.08) * oracle
        assert plain / seconds > 1.15
    assert sum(plan == OFF for plan in plans[:20]) >= 10
    assert OFF not in plans[-150:]
    # If nothing can be gained, probes cost little.
    useless = CostModelSelector(PLANS)
    seconds, plain, _ = simulate(useless, sizes * 3, acceptance=lambda _: 0.0)
    assert plain / seconds > 0.98


def test_changes_of_the_machine_speed_rarely_cause_bad_plans() -> None:
    # For 20 to 120 steps all steps are slower or faster, as on shared hardware.
    shares = []
    for seed in range(40):
        speeds: list[float] = []
        rng = random.Random(seed)
        # `simulate` asks three times per step: measured, expected, and plain seconds.
        while len(speeds) < 3 * 650:
            speeds += [math.exp(rng.gauss(0, 0.3))] * (3 * rng.randrange(20, 120))
        steps = iter(speeds)

        def cost(running: int, drafts: int, steps: Iterator[float] = steps) -> float:
            return cpu(running, drafts) * next(steps)

        selector = CostModelSelector(PLANS)
        simulate(selector, [16] * 250, acceptance=lambda _: 0.85, cost=cost, seed=seed)
        _, _, plans = simulate(
            selector, [16] * 400, acceptance=lambda _: 0.85, cost=cost, seed=seed + 1000
        )
        rate = sum(made(16, plan, 0.85) for plan in plans) * 16
        rate /= sum(cpu(16, plan.steps) for plan in plans)
        shares.append(rate / best_rate(16, 0.85))
    assert mean(shares) > 0.97
    assert sum(share < 0.95 for share in shares) <= 4


def test_disturbed_probes_do_not_end_probing() -> None:
    # One step in a hundred takes five times as long. Drafts gain at most 15 %.
    poor = 0
    for seed in range(100):
        selector = CostModelSelector(PLANS)
        simulate(selector, [32] * 60, acceptance=lambda _: 0.9, seed=2 * seed)
        _, _, plans = simulate(selector, [32] * 400, acceptance=lambda _: 0.9, seed=2 * seed + 1)
        poor += sum(plan != OFF for plan in plans[-200:]) <= 150
    assert poor <= 8


@pytest.mark.parametrize(("running", "steps"), [(4, 4), (16, 2)])
def test_steps_of_a_probe(running: int, steps: int) -> None:
    selector = CostModelSelector(PLANS)
    _, _, plans = simulate(selector, [running] * 300, acceptance=lambda _: 0.1)
    probes = [
        len(list(group)) for off, group in groupby(plans, lambda plan: plan == OFF) if not off
    ]
    # Probes can follow each other.
    assert math.gcd(*probes) == steps


def test_the_plan_follows_changing_acceptance() -> None:
    selector = CostModelSelector(PLANS)

    def acceptance(step: int) -> float:
        return 0.85 if step < 1500 or step >= 3000 else 0.02

    _, _, plans = simulate(selector, [2] * 4500, acceptance=acceptance)
    assert sum(plan.steps >= 4 for plan in plans[1300:1500]) > 180
    assert sum(plan == OFF for plan in plans[2000:3000]) > 900
    assert sum(plan.steps >= 4 for plan in plans[4200:]) > 270


def test_small_gains_do_not_change_the_plan() -> None:
    def flat(running: int, drafts: int) -> float:
        return sum(0.7**depth for depth in range(drafts + 1))

    selector = CostModelSelector(PLANS)
    _, _, plans = simulate(selector, [3] * 2000, cost=flat, noise=0.02)
    switches = sum(a != b for a, b in pairwise(plans[200:]))
    assert switches < 100  # each probe has two


def test_slower_machines_do_not_favor_plans_measured_earlier() -> None:
    selector = CostModelSelector(PLANS)
    count = 0

    def slowing(running: int, drafts: int) -> float:
        nonlocal count
        count += 1
        return cpu(running, drafts) * (1 + count / 500)

    _, _, plans = simulate(selector, [1] * 1500, cost=slowing)
    assert sum(plan.steps >= 2 for plan in plans[-500:]) > 400  # probes without drafts last eight


def test_beyond_the_threshold_nothing_is_drafted() -> None:
    selector = CostModelSelector(PLANS, bs_threshold=8)
    _, _, plans = simulate(selector, [9, 64] * 50)
    assert set(plans) == {OFF}
    fixed = PredefinedSelector(DraftPlan.chain(2), bs_threshold=8)
    assert (fixed.select(8), fixed.select(9)) == (DraftPlan.chain(2), OFF)


def test_batch_sizes_are_measured_together_in_ever_coarser_buckets() -> None:
    sizes = [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 33, 64, 65]
    assert [bucket_of(n) for n in sizes] == [1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 16, 16, 24, 48, 64, 96]


def test_no_draft_plan_is_an_error() -> None:
    with pytest.raises(ConfigError, match="at least one draft plan"):
        CostModelSelector([OFF])


def test_each_batch_size_begins_with_plain_decoding() -> None:
    # Smaller batches gain from drafts; this size does not.
    def cost(running: int, drafts: int) -> float:
        return 1e-3 * (1.0 + 0.2 * drafts if running <= 4 else 1.0 + 2.0 * drafts)

    selector = CostModelSelector(PLANS)
    simulate(selector, [4] * 300, cost=cost)
    _, _, plans = simulate(selector, [6] * 130, cost=cost)
    assert plans[:8] == [OFF] * 8
    assert sum(plan == OFF for plan in plans[-30:]) >= 24


def test_probes_show_that_plain_steps_became_faster() -> None:
    def cost(running: int, drafts: int) -> float:
        return 1e-3 * (1.0 + 0.2 * drafts)

    found = 0
    for seed in range(10):
        selector = CostModelSelector(PLANS)
        simulate(selector, [2] * 300, acceptance=lambda _: 0.55, cost=cost, seed=seed)
        assert selector._buckets[2].current != OFF
        _, _, plans = simulate(
            selector,
            [2] * 2000,
            acceptance=lambda _: 0.55,
            cost=lambda running, drafts: cost(running, drafts) if drafts else 4e-4,
            seed=seed + 50,
        )
        found += sum(plan == OFF for plan in plans[-100:]) >= 80
    assert found >= 6


@pytest.mark.parametrize(
    ("acceptance", "least", "most"), [(0.0, 0.75, 0.85), (0.6, 0.0, 0.2), (0.9, 0.0, 0.0)]
)
def test_rollouts_are_decoded_plainly_after_drafts_gained_nothing(
    acceptance: float, least: float, most: float
) -> None:
    selector, skipped, gained, rollouts = CostModelSelector(PLANS), 0, 0.0, 40
    sizes = [running for running in (32, 16, 8, 4, 2, 1) for _ in range(40)]
    for rollout in range(rollouts):
        if selector.begin_rollout(sizes[0]):
            skipped += 1
            continue
        seconds, plain, _ = simulate(
            selector, sizes, acceptance=lambda step: acceptance, seed=rollout
        )
        gained += plain / seconds - 1
    assert least <= skipped / rollouts <= most
    # Small gains are kept.
    assert gained / (rollouts - skipped) > (0.08 if acceptance else -0.03)


def test_no_probe_runs_beyond_the_threshold() -> None:
    # Both sizes are in one bucket.
    selector = CostModelSelector(PLANS, bs_threshold=5)
    sizes = [5] * 30 + [5, 6] * 500
    _, _, plans = simulate(selector, sizes, acceptance=lambda _: 0.9)
    assert {plan for size, plan in zip(sizes, plans, strict=True) if size == 6} == {OFF}
    assert sum(plan != OFF for plan in plans) > 100


def tree_steps(
    selector: StrategySelector,
    running: int,
    steps: int,
    tree_gains: float,
    seed: int = 0,
    *,
    wrong: float = 0.35,
    row: float = 0.02,
) -> list[DraftPlan]:
    """Chosen plans on a machine where one more token costs `row` milliseconds of about three.
    Drafts of chains are rejected with probability `wrong`, those of trees with `wrong` to the power
    of `tree_gains`."""
    rng, plans = random.Random(seed), list[DraftPlan]()
    for _ in range(steps):
        plan = selector.select(running)
        milliseconds = 3.0 + row * running * (plan.verify_tokens + 0.3 * plan.draft_rows)
        milliseconds += 0.2 + 0.1 * plan.steps if plan != OFF else 0.0
        accepted, straight = list[int](), list[tuple[int, int]]()
        for _ in range(running if plan != OFF else 0):
            draws = [rng.random() for _ in range(plan.steps)]
            of_chain, of_tree = (
                next((i for i, draw in enumerate(draws) if draw < rejection), plan.steps)
                for rejection in (wrong, wrong**tree_gains)
            )
            accepted.append(of_chain if plan.topk == 1 else of_tree)
            straight += [(plan.steps, min(of_chain, of_tree))] if plan.topk > 1 else []
        selector.record(
            StepRecord(
                running=running,
                plan=plan,
                seconds=1e-3 * milliseconds * (1 + 0.05 * rng.gauss(0, 1)),
                drafted=[plan.verify_tokens - 1] * len(accepted),
                accepted=accepted,
                straight=straight,
            )
        )
        plans.append(plan)
    return plans


@pytest.mark.parametrize(("tree_gains", "tree"), [(2.0, True), (0.8, False)])
@pytest.mark.parametrize("running", [1, 4])
def test_trees_are_chosen_if_they_are_faster(tree_gains: float, tree: bool, running: int) -> None:
    found = []
    for seed in range(5):
        selector = CostModelSelector([*PLANS, DraftPlan(6, 3, 10), DraftPlan(6, 4, 16)])
        plans = tree_steps(selector, running, 900, tree_gains, seed)
        found += [plan.topk > 1 for plan in plans[-200:]]
    assert (mean(found) > 0.8) is tree
    assert (mean(found) < 0.2) is not tree


def test_acceptance_of_trees_predicts_chains() -> None:
    # Nearly all drafts are accepted, but only trees ran. Their first children show it.
    found = []
    for seed in range(5):
        trees = map(DraftPlan.parse, ("4_2_8", "6_2_12", "6_4_16"))
        selector = CostModelSelector([DraftPlan.chain(11), *trees])
        plans = tree_steps(selector, 1, 600, 2.0, seed, wrong=0.04)
        found += [plan == DraftPlan.chain(11) for plan in plans[200:]]
    assert mean(found) > 0.8


def learned(selector: CostModelSelector, steps: list[StepRecord]) -> None:
    """Record steps and learn from them at once."""
    for step in steps:
        selector.record(step)
    selector._learn()


def test_plain_steps_right_after_drafts_are_not_measured() -> None:
    selector, plan = CostModelSelector(PLANS), DraftPlan.chain(1)
    draft = StepRecord(running=4, plan=plan, seconds=3e-3, drafted=[1] * 4, accepted=[1] * 4)
    learned(selector, [StepRecord(running=4, plan=OFF, seconds=1e-3)] * 20)
    for _ in range(200):
        learned(selector, [draft, *[StepRecord(running=4, plan=OFF, seconds=2e-3)] * 3])
    assert selector._costs.seconds(4, OFF, 4) == pytest.approx(1e-3, rel=0.2)
    assert selector._costs.seconds(4, plan, 4) == pytest.approx(3e-3, rel=0.1)


@pytest.mark.parametrize(
    ("running", "seconds", "most"),
    [(2, 1.0, 16), (2, 5e-4, 64), (32, 1.0, 2), (32, 0.012, 5), (32, 5e-4, 64)],
)
def test_short_steps_are_planned_less_often(running: int, seconds: float, most: int) -> None:
    def cost(running: int, drafts: int) -> float:
        return seconds * (1 + 0.1 * drafts)

    assert longest_wait(running, acceptance=0.95, cost=cost) == most


def test_slow_steps_without_drafts_are_planned_less_often() -> None:
    assert longest_wait(32, acceptance=0.05, cost=lambda *args: 10 * cpu(*args)) == 16


def longest_wait(running: int, *, acceptance: float, cost: Cost) -> int:
    """The most steps between two searches, after the first 200 steps."""
    waits = list[int]()

    class Watched(CostModelSelector):
        def select(self, running: int) -> DraftPlan:
            plan = super().select(running)
            waits.append(self._buckets[running].left + 1)
            return plan

    simulate(Watched(PLANS), [running] * 2000, acceptance=lambda _: acceptance, cost=cost)
    return max(waits[200:])


def test_each_plain_step_fades_acceptance() -> None:
    selector = CostModelSelector(PLANS)
    simulate(selector, [4] * 200, acceptance=lambda _: 0.9)
    learned(selector, [])
    before = selector.curve._tried[0]
    learned(selector, [StepRecord(running=4, plan=OFF, seconds=4.8e-3)] * 200)
    assert selector.curve._tried[0] == pytest.approx(before * 0.998**200)


def test_new_weights_halve_the_weight_of_earlier_acceptance() -> None:
    selector = CostModelSelector(PLANS)
    simulate(selector, [2] * 200, acceptance=lambda _: 0.9)
    learned(selector, [])
    before = selector.curve._tried[0]
    selector.changed()
    assert selector.curve._tried[0] == pytest.approx(0.5 * before)


def test_a_switch_is_confirmed_by_steps_of_the_plan_before() -> None:
    # The machine becomes twice as fast exactly during probes.
    selector, count = CostModelSelector(PLANS), 0

    def cost(running: int, drafts: int) -> float:
        return (2e-3 if selector._probing else 4e-3) * (1 + 0.6 * drafts)

    _, _, plans = simulate(selector, [4] * 2000, acceptance=lambda _: 0.3, cost=cost)
    count = sum(plan != OFF for plan in plans)
    assert count < 500


def test_an_expensive_catch_up_limits_probes() -> None:
    used = []
    for catch_up in (0.0, 0.5):
        selector, missed = CostModelSelector(PLANS), 0
        drafting = 0
        for _ in range(3000):
            plan = selector.select(8)
            seconds = 1e-2 * (1 + 0.5 * plan.steps) + (catch_up if plan != OFF and missed else 0.0)
            accepted = [0] * 8 if plan != OFF else []
            selector.record(
                StepRecord(
                    running=8,
                    plan=plan,
                    seconds=seconds,
                    drafted=[plan.steps] * len(accepted),
                    accepted=accepted,
                    steady=plan == OFF or not missed,
                )
            )
            missed = 0 if plan != OFF else missed + 1
            drafting += plan != OFF
        used.append(drafting)
    assert used[1] < 0.5 * used[0]


@pytest.mark.parametrize("running", [1, 8])
def test_min_acceptance_follows_the_cost_of_a_token(running: int) -> None:
    plans = [*PLANS, DraftPlan(6, 3, 10), DraftPlan(3, 3, 8), DraftPlan(4, 4, 16)]
    found = []
    for token in (0.02, 0.3):
        selector, rng = CostModelSelector(plans), random.Random(0)
        for step in range(600):
            # Run all plans, because the chosen ones do not show the cost of a token.
            selector.select(running)
            plan = [OFF, *plans][step // 8 % (1 + len(plans))]
            milliseconds = 3.0 + token * running * plan.verify_tokens + 0.1 * plan.steps
            drafts = [plan.verify_tokens - 1] * running if plan != OFF else []
            selector.record(
                StepRecord(
                    running=running,
                    plan=plan,
                    seconds=1e-3 * milliseconds * math.exp(rng.gauss(0, 0.03)),
                    drafted=drafts,
                    accepted=[2] * len(drafts),
                )
            )
        selector._learn()
        selector._search(running, None)
        found.append(selector.min_acceptance(running))
    cheap, expensive = found
    assert 0 <= cheap < 0.12
    assert 0.12 < expensive <= 0.9


def cut_tree(plan: DraftPlan, running: int, drafts: int) -> StepRecord:
    """A step of 3 ms and 0.1 ms per token, which verifies `drafts` draft tokens per request."""
    seconds = 3e-3 + 1e-4 * running * (1 + drafts)
    counts = [drafts] * running if drafts else []
    return StepRecord(
        running=running, plan=plan, seconds=seconds, drafted=counts, accepted=[0] * len(counts)
    )


def test_trees_with_drafts_left_out_show_the_cost_of_their_tokens() -> None:
    plan, other = DraftPlan(6, 4, 24), DraftPlan(6, 4, 16)
    selector = CostModelSelector([*PLANS, plan, other])
    for _ in range(60):
        for steps in (
            [cut_tree(OFF, 4, 0)] * 5,
            [cut_tree(PLANS[2], 4, 3)] * 3,
            [cut_tree(plan, 4, 4)] * 3,
            [cut_tree(plan, 4, 7)] * 3,
        ):
            learned(selector, steps)
    # A tree that never ran is predicted to cost what all of its tokens do.
    found = selector._costs.seconds(4, other, 4)
    assert found == pytest.approx(3e-3 + 1e-4 * 4 * 16, rel=0.15)


def test_a_tree_without_drafts_left_is_not_a_plain_step() -> None:
    plan = DraftPlan(6, 4, 16)
    selector = CostModelSelector([*PLANS, plan])
    for _ in range(100):
        plain = [StepRecord(running=2, plan=OFF, seconds=1.0)] * 6
        # The drafter has run.
        learned(selector, [*plain, *[StepRecord(running=2, plan=plan, seconds=1.5)] * 2])
    assert selector._costs.seconds(2, OFF, 2) == pytest.approx(1.0, rel=0.02)
    assert selector._costs.seconds(2, plan, 2, 0.0) == pytest.approx(1.5, rel=0.05)
    drafts, accepted = selector._tree_expectation(2, plan)
    assert drafts < 1
    assert accepted < 0.5


def test_tree_ratios_fade_while_chains_are_drafted() -> None:
    plan, chain = DraftPlan(4, 2, 8), PLANS[2]
    selector = CostModelSelector([*PLANS, plan])

    def of(plan: DraftPlan, accepted: list[int]) -> StepRecord:
        drafted = [plan.verify_tokens - 1] * 4
        return StepRecord(running=4, plan=plan, seconds=1.0, drafted=drafted, accepted=accepted)

    learned(selector, [of(chain, [3] * 4)] * 100)
    before = selector._tree_expectation(4, plan)[1]
    learned(selector, [of(plan, [0] * 4)] * 50)
    assert selector._tree_expectation(4, plan)[1] < 0.5 * before
    learned(selector, [of(chain, [3] * 4)] * 4000)
    assert selector._tree_expectation(4, plan)[1] > 0.7 * before


def test_first_children_of_trees_show_the_acceptance_of_chains() -> None:
    plan = DraftPlan(4, 3, 12)
    selector = CostModelSelector([*PLANS, plan])
    for _ in range(100):
        step = StepRecord(
            running=2,
            plan=plan,
            seconds=1.0,
            drafted=[11, 11],
            accepted=[3, 4],
            # Of three drafts in a chain, two and none were accepted: rates of 1/2, 1 and 0.
            straight=[(3, 2), (3, 0)],
        )
        learned(selector, [step])
    assert selector.curve.rates(3) == pytest.approx([0.5, 1.0, 0.0], abs=0.1)
    # Siblings were accepted in place of the first children.
    assert selector._tree_expectation(2, plan)[1] == pytest.approx(3.5, abs=0.3)


def test_trees_for_which_nothing_was_drafted_do_not_fade_acceptance() -> None:
    tree, chain = DraftPlan(4, 2, 8), DraftPlan.chain(2)
    selector = CostModelSelector([chain, tree])
    steps = [StepRecord(running=4, plan=OFF, seconds=1e-3)] * 8
    steps += [StepRecord(running=4, plan=chain, seconds=1e-3, drafted=[2] * 4, accepted=[1] * 4)]
    learned(selector, steps)
    compared = selector.curve.compared
    empty = StepRecord(running=4, plan=tree, seconds=1e-3, straight=[(0, 0)] * 4)
    learned(selector, [empty] * 10)
    assert selector.curve.compared == compared > 0


def test_large_batch_sizes_share_the_budget_for_probes() -> None:
    sizes = [size for size in (64, 48, 32, 24, 16, 12, 8, 6) for _ in range(40)]
    probed = 0
    for seed in range(5):
        selector = CostModelSelector(PLANS)
        _, _, plans = simulate(selector, sizes, acceptance=lambda _: 0.3, seed=seed)
        probed += sum(plan != OFF for plan in plans)
    # With a budget for each batch size it would be 162.
    assert 0 < probed < 60
