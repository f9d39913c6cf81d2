"""ListsChoices by measurement: on simulated machines whose best plan is known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from itertools import groupby, islice, pairwise
from statistics import mean

import pytest

from slipstream.errors import ConfigError
from slipstream.inference.speculation import selector as selector_module
from slipstream.inference.speculation.plan import OFF, DraftPlan
from slipstream.inference.speculation.recess import Recess
from slipstream.inference.speculation.selector import (
    CostModelSelector,
    PredefinedSelector,
    StepRecord,
    StrategySelector,
    _Look,
    bucket_of,
)

PLANS = [DraftPlan.chain(n) for n in (1, 2, 3, 4, 6)]
Cost = Callable[[int, int], float]
"""Seconds of a step by running requests and drafts."""


def cpu(running: int, drafts: int) -> float:
    """Seconds, about what two cores take: rows cost, and each draft costs a little more."""
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
    """Of steps of the given batch sizes: (seconds, those of plain decoding for as many tokens,
    plans)."""
    rng = random.Random(seed)
    seconds = plain = 0.0
    plans, before = [], OFF
    for step, running in enumerate(sizes):
        plan = selector.select(running)
        took = cost(running, plan.steps) * (1 + noise * rng.gauss(0, 1))
        if rng.random() < 0.01:
            took *= 5  # something else ran
        drafted = [plan.steps] * running if plan.steps else []
        accepted = []
        for drafts in drafted:
            right = 0
            while right < drafts and rng.random() < acceptance(step):
                right += 1
            accepted.append(right)
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


def slept_through(selector: CostModelSelector, steps: list[StepRecord]) -> None:
    """Steps that go by without a thought; then they, and all before, are learned from."""
    for step in steps:
        selector._asleep = True
        selector.record(step)
    selector._remember()
    selector._learn()


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
        # What the chosen plans yield on average, without the luck of the draw.
        seconds = [cpu(running, plan.steps) for plan in plans]
        tokens = sum(
            expected_rate(running, plan.steps, p) * took
            for plan, took in zip(plans, seconds, strict=True)
        )
        rates.append(tokens / sum(seconds))
    assert mean(rates) > 0.95 * best_rate(running, p)
    # One run in many is unlucky with its first looks, and stays without drafts for long.
    unlucky, *others = sorted(rates)
    assert min(others) > 0.9 * best_rate(running, p)
    assert unlucky > 0.8 * best_rate(running, p)


def test_looks_begin_with_those_that_lose_little() -> None:
    # Seven rows of each of 64 requests take five times as long as one.
    for seed in range(4):
        selector = CostModelSelector(PLANS)
        _, _, plans = simulate(selector, [64] * 80, acceptance=lambda _: 0.9, seed=seed)
        tried = list(dict.fromkeys(plan.steps for plan in plans))
        assert tried == sorted(tried)


def test_a_shrinking_batch_is_never_much_slower_than_plain_and_gains_in_the_tail() -> None:
    sizes = [64 - i // 4 for i in range(240)] + [4] * 100 + [2] * 100 + [1] * 200
    selector = CostModelSelector(PLANS)
    for seed in range(3):
        seconds, plain, plans = simulate(selector, sizes, seed=seed)
        oracle = sum(
            n / best_rate(n, 0.7) * made(n, plan) for n, plan in zip(sizes, plans, strict=True)
        )
        # Few steps of each size: the first rollout pays for all of the measuring.
        assert seconds < (1.05 if seed else 1.08) * oracle
        assert plain / seconds > 1.15
    assert sum(plan == OFF for plan in plans[:20]) >= 10
    assert OFF not in plans[-150:]
    # With nothing to gain, exploring costs little.
    useless = CostModelSelector(PLANS)
    seconds, plain, _ = simulate(useless, sizes * 3, acceptance=lambda _: 0.0)
    assert plain / seconds > 0.98


def test_a_machine_with_moods_is_seldom_misjudged() -> None:
    # For 20 to 120 steps all steps take longer, or less long: neighbours on the same hardware.
    shares = []
    for seed in range(40):
        moods: list[float] = []
        rng = random.Random(seed)
        # Three for each of 650 steps: what it took, and two that `simulate` compares it with.
        while len(moods) < 3 * 650:
            moods += [math.exp(rng.gauss(0, 0.3))] * (3 * rng.randrange(20, 120))
        steps = iter(moods)

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


def test_what_disturbs_a_look_does_not_end_looking() -> None:
    # One step in a hundred takes five times as long, whatever it does. Drafts gain 15 % at best.
    poor = 0
    for seed in range(100):
        selector = CostModelSelector(PLANS)
        simulate(selector, [32] * 60, acceptance=lambda _: 0.9, seed=2 * seed)
        _, _, plans = simulate(selector, [32] * 400, acceptance=lambda _: 0.9, seed=2 * seed + 1)
        poor += sum(plan != OFF for plan in plans[-200:]) <= 150
    assert poor <= 8


def test_where_drafters_must_catch_up_first_a_look_is_longer() -> None:
    selector = CostModelSelector(PLANS)
    _, _, plans = simulate(selector, [16] * 30, acceptance=lambda _: 0.3)
    looks = [len(list(group)) for off, group in groupby(plans, lambda plan: plan == OFF) if not off]
    assert min(looks) >= 4


def test_follows_a_policy_that_drifts() -> None:
    selector = CostModelSelector(PLANS)

    def acceptance(step: int) -> float:
        return 0.85 if step < 1500 or step >= 3000 else 0.02

    _, _, plans = simulate(selector, [2] * 4500, acceptance=acceptance)
    assert sum(plan.steps >= 4 for plan in plans[1300:1500]) > 180
    assert sum(plan == OFF for plan in plans[2000:3000]) > 900
    assert sum(plan.steps >= 4 for plan in plans[4200:]) > 270


def test_a_choice_is_kept_where_little_would_be_gained() -> None:
    def flat(running: int, drafts: int) -> float:
        return sum(0.7**depth for depth in range(drafts + 1))

    selector = CostModelSelector(PLANS)
    _, _, plans = simulate(selector, [3] * 2000, cost=flat, noise=0.02)
    switches = sum(a != b for a, b in pairwise(plans[200:]))
    assert switches < 100  # looking again takes two each time


def test_slower_machines_and_longer_contexts_do_not_favour_what_was_measured_before() -> None:
    selector = CostModelSelector(PLANS)
    count = 0

    def slowing(running: int, drafts: int) -> float:
        nonlocal count
        count += 1
        return cpu(running, drafts) * (1 + count / 500)

    _, _, plans = simulate(selector, [1] * 1500, cost=slowing)
    assert sum(plan.steps >= 2 for plan in plans[-500:]) > 400  # looks without drafts last eight


def test_beyond_the_threshold_nothing_is_drafted() -> None:
    selector = CostModelSelector(PLANS, bs_threshold=8)
    _, _, plans = simulate(selector, [9, 64] * 50)
    assert set(plans) == {OFF}
    fixed = PredefinedSelector(DraftPlan.chain(2), bs_threshold=8)
    assert (fixed.select(8), fixed.select(9)) == (DraftPlan.chain(2), OFF)


def test_batch_sizes_are_measured_together_in_ever_coarser_buckets() -> None:
    sizes = [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 33, 64, 65]
    assert [bucket_of(n) for n in sizes] == [1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 16, 16, 24, 48, 64, 96]


def test_there_must_be_a_plan() -> None:
    with pytest.raises(ConfigError, match="at least one draft plan"):
        CostModelSelector([OFF])


def test_a_batch_size_begins_without_drafts_and_is_looked_at_without_them_again() -> None:
    # Its neighbours draft, and gain by it; it would not.
    def cost(running: int, drafts: int) -> float:
        return 1e-3 * (1.0 + 0.2 * drafts if running <= 4 else 1.0 + 2.0 * drafts)

    selector = CostModelSelector(PLANS)
    simulate(selector, [4] * 300, cost=cost)
    _, _, plans = simulate(selector, [6] * 130, cost=cost)
    assert plans[:8] == [OFF] * 8
    assert sum(plan == OFF for plan in plans[-30:]) >= 24


def test_only_a_look_tells_that_steps_without_drafts_have_become_fast() -> None:
    def cost(running: int, drafts: int) -> float:
        return 1e-3 * (1.0 + 0.2 * drafts)

    found = 0
    for seed in range(10):
        selector = CostModelSelector(PLANS)
        simulate(selector, [2] * 300, acceptance=lambda _: 0.55, cost=cost, seed=seed)
        assert selector._bucket(2).current != OFF
        _, _, plans = simulate(
            selector,
            [2] * 2000,
            acceptance=lambda _: 0.55,
            cost=lambda running, drafts: cost(running, drafts) if drafts else 4e-4,
            seed=seed + 50,
        )
        found += sum(plan == OFF for plan in plans[-100:]) >= 80
    assert found >= 6


def test_the_first_steps_after_drafts_do_not_count_as_those_without() -> None:
    selector = CostModelSelector(PLANS)
    plan = DraftPlan.chain(1)
    draft = StepRecord(running=4, plan=plan, seconds=3e-3, drafted=[1] * 4, accepted=[1] * 4)
    slept_through(selector, [StepRecord(running=4, plan=OFF, seconds=1e-3)] * 20)
    for _ in range(200):
        slept_through(selector, [draft, *[StepRecord(running=4, plan=OFF, seconds=2e-3)] * 3])
    assert selector._costs.seconds(4, DraftPlan.chain(0), 4) == pytest.approx(1e-3, rel=0.2)
    assert selector._costs.seconds(4, DraftPlan.chain(1), 4) == pytest.approx(3e-3, rel=0.1)


@pytest.mark.parametrize(("seconds", "asleep"), [(1.0, 0.0), (1e-3, 0.95)])
def test_of_short_steps_with_drafts_only_some_are_thought_about(
    seconds: float, asleep: float
) -> None:
    def cost(running: int, drafts: int) -> float:
        return seconds * (1 + 0.1 * drafts)

    selector = CostModelSelector(PLANS)
    simulate(selector, [2] * 600, acceptance=lambda _: 0.95, cost=cost)
    sleeping, drafting = 0, 0
    for _ in range(200):
        _, _, (plan,) = simulate(selector, [2], acceptance=lambda _: 0.95, cost=cost)
        sleeping += selector._asleep
        drafting += plan != OFF
    assert drafting >= 180
    assert sleeping / 200 == pytest.approx(asleep, abs=0.05)


def test_of_acceptance_each_plain_step_takes_the_same_thought_about_or_not() -> None:
    selector = CostModelSelector(PLANS)
    simulate(selector, [4] * 200, acceptance=lambda _: 0.9)
    slept_through(selector, [])
    before = selector.curve._tried[0]
    for asleep in (False, True):
        for _ in range(200):
            selector._asleep = asleep
            selector.record(StepRecord(running=4, plan=OFF, seconds=4.8e-3))
        slept_through(selector, [])
        before *= 0.998**200
        assert selector.curve._tried[0] == pytest.approx(before)


def test_of_drafts_made_without_a_thought_acceptance_is_learned() -> None:
    plan = DraftPlan.chain(2)
    steps = [
        StepRecord(running=2, plan=plan, seconds=1e-3, drafted=[2, 2], accepted=accepted)
        for accepted in ([2, 0], [1, 2], [0, 0], [2, 1]) * 5
    ]
    curves = []
    for asleep in (False, True):
        selector = CostModelSelector(PLANS)
        for step in steps:
            selector._asleep = asleep
            selector.record(step)
        slept_through(selector, [])
        curves.append((selector.curve.rates(2), selector._bucket(2).curve.rates(2)))
    # Of twenty steps the first ones count as much as the last.
    for awake, dreaming in zip(*curves, strict=True):
        assert dreaming == pytest.approx(awake, abs=0.02)


def test_plain_steps_are_learned_from_and_count_as_missed() -> None:
    selector = CostModelSelector(PLANS, bs_threshold=0)
    for seconds in (*[1e-3] * 80, *[2e-3] * 800):
        assert selector.select(4) == OFF
        selector.record(StepRecord(running=4, plan=OFF, seconds=seconds))
    selector._remember()
    selector._learn()
    selector._asleep = False
    assert selector._costs.seconds(4, DraftPlan.chain(0), bucket_of(4)) == pytest.approx(
        2e-3, rel=0.1
    )
    assert selector._buckets[bucket_of(4)].seen.steps == 880
    assert selector._spent == pytest.approx(0.08 + 1.6)
    plan, drafted, accepted = DraftPlan.chain(3), [3] * 4, [2] * 4
    draft = StepRecord(running=4, plan=plan, seconds=3e-3, drafted=drafted, accepted=accepted)
    missed = []
    for _ in range(3):
        for step in (draft, *[StepRecord(running=4, plan=OFF, seconds=2e-3)] * 2):
            selector.record(step)
            missed.append(selector._rest.missed)
    assert missed == [0, 1, 2] * 3


def test_steps_slept_through_are_learned_from_together() -> None:
    selector = CostModelSelector(PLANS, bs_threshold=0)

    def plain(seconds: float) -> None:
        selector.select(4)
        selector.record(StepRecord(running=4, plan=OFF, seconds=seconds))

    for _ in range(2000):
        plain(1e-3)
    # What is thought about takes as long as ever; the others now take longer.
    while selector._sleep < 20:
        plain(1e-3)
    before = selector._costs.seconds(4, DraftPlan.chain(0), 4)
    while selector._sleep:
        plain(1.5e-3)
    assert selector._costs.seconds(4, DraftPlan.chain(0), 4) == before
    selector.select(4)
    assert selector._costs.seconds(4, DraftPlan.chain(0), 4) > 1.02 * before


def test_drafting_begins_again_only_where_it_pays_for_what_was_missed() -> None:
    # From sixteen requests on drafts cost more than they gain, at two they gain a quarter; but what
    # was written meanwhile must be taken in first.
    def steps_with_drafts(taking_in: float, tail: int, seed: int) -> float:
        selector, used, missed = CostModelSelector(PLANS), 0, 0
        rng = random.Random(seed)
        for rollout in range(12):
            for running in [16] * 200 + [2] * tail:
                plan = selector.select(running)
                late = missed * running * taking_in if plan != OFF else 0.0
                rows = running * (plan.steps + 1)
                milliseconds = 4 + 0.8 * rows + (0.5 + 0.3 * running) * plan.steps + late
                step = StepRecord(
                    running=running,
                    plan=plan,
                    seconds=1e-3 * milliseconds * (1 + 0.03 * rng.gauss(0, 1)),
                    drafted=[plan.steps] * running if plan.steps else [],
                    accepted=[1] * running if plan.steps else [],
                    steady=plan == OFF or not missed,
                )
                selector.record(step)
                missed = missed + 1 if plan == OFF else 0
                used += rollout >= 6 and running == 2 and plan != OFF
            missed = 0  # new requests
        return used / 6 / tail

    unlucky, *others = sorted(steps_with_drafts(0.0, 100, seed) for seed in range(10))
    assert others[0] > 0.8
    assert unlucky > 0.5
    for seed in range(4):
        assert steps_with_drafts(0.1, 5, seed) < 0.3
        assert steps_with_drafts(0.1, 400, seed) > 0.8


def test_drafts_are_not_weighed_against_what_will_be_decoded_without_them() -> None:
    # At four requests, which are not for long, drafts are right; at two, which are for long, not.
    selector, used, missed = CostModelSelector(PLANS), 0, 0
    rng = random.Random(0)
    for rollout in range(24):
        for running in [16] * 150 + [4] * 8 + [2] * 200:
            plan = selector.select(running)
            late = missed * running * 0.1 if plan != OFF else 0.0
            milliseconds = 4 + 0.1 * running * (plan.steps + 1) + 0.7 * plan.steps + late
            step = StepRecord(
                running=running,
                plan=plan,
                seconds=1e-3 * milliseconds * (1 + 0.03 * rng.gauss(0, 1)),
                drafted=[plan.steps] * running if plan.steps else [],
                accepted=[int(running == 4)] * running if plan.steps else [],
                steady=plan == OFF or not missed,
            )
            selector.record(step)
            missed = missed + 1 if plan == OFF else 0
            used += rollout >= 8 and running == 4 and plan != OFF
        missed = 0
    assert used / 16 / 8 < 0.2


def test_what_drafts_gained_is_added_up_when_nobody_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[tuple[float, float, int]] = []
    begun: list[int] = []

    class Told(Recess):
        def stepped(self, seconds: float, gained: float = 0.0, steps: int = 1) -> None:
            told.append((seconds, gained, steps))

        def begin_rollout(self, requests: int) -> int:
            begun.append(sum(steps for _, _, steps in told))
            return super().begin_rollout(requests)

    monkeypatch.setattr(selector_module, "Recess", Told)
    sizes, shares = [4] * 700 + [2] * 333, []
    # Plain decoding is looked at seldom, so what is believed of it is some per cent off.
    for seed in range(1, 9):
        told.clear()
        selector = CostModelSelector(PLANS)
        seconds, plain, _ = simulate(selector, sizes, seed=seed)
        selector.begin_rollout(4)
        shares.append(sum(gained for _, gained, _ in told) / (plain - 1.015 * seconds))
    assert mean(shares) == pytest.approx(1, abs=0.1)
    told.clear()
    begun.clear()
    selector = CostModelSelector(PLANS)
    seconds, plain, plans = simulate(selector, sizes)
    assert sum(steps for _, _, steps in told) < len(sizes)  # the last went by without a thought
    assert selector.begin_rollout(4) == 0
    assert begun == [len(sizes)]
    # One step in a hundred is disturbed and takes five times as long; of that, half counts.
    assert sum(took for took, _, _ in told) == pytest.approx(1.04 * seconds, rel=0.03)
    assert plain / seconds > 1.3
    drafting = iter([plan != OFF for plan in plans])
    for _, gained, steps in told:
        assert sum(islice(drafting, steps)) or gained == 0


@pytest.mark.parametrize(
    ("acceptance", "least", "most"), [(0.0, 0.75, 0.85), (0.6, 0.0, 0.2), (0.9, 0.0, 0.0)]
)
def test_rollouts_without_gain_are_skipped(acceptance: float, least: float, most: float) -> None:
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
    # Where little is to be gained, it is not given away.
    assert gained / (rollouts - skipped) > (0.08 if acceptance else -0.03)


def test_who_begins_anew_has_missed_nothing() -> None:
    selector = CostModelSelector(PLANS)
    simulate(selector, [4] * 100, acceptance=lambda step: 0.0)
    selector.select(3)  # remembers
    assert selector._rest.missed > 0
    selector.begin_rollout(4)
    assert selector._rest.missed == 0


def test_new_requests_are_noticed_while_plain_steps_go_by_without_a_thought() -> None:
    selector = CostModelSelector(PLANS)

    def plain(running: int) -> None:
        selector.select(running)
        selector.record(StepRecord(running=running, plan=OFF, seconds=1e-3))

    # All of one class of sizes.
    assert len({bucket_of(running) for running in (50, 60)}) == 1
    plain(60)
    while not selector._asleep:
        plain(60)
    plain(50)
    assert selector._asleep
    selector._remember()
    missed = selector._rest.missed
    plain(60)
    selector._remember()
    # Ten new ones have missed nothing; the step itself adds one for all.
    assert selector._rest.missed == pytest.approx(missed * 50 / 60 + 1)


def _even(running: int, drafts: int) -> float:
    """Seconds of a step where each draft that is right saves a little more than it takes."""
    return 0.1 * (1 + 0.9 * drafts)


def test_looks_end_where_they_have_lost_too_much() -> None:
    selector = CostModelSelector(PLANS)
    simulate(selector, [4] * 300, acceptance=lambda _: 1.0, cost=_even)
    bucket = selector._buckets[4]

    def looks_at(lost: float, lost_plain: float) -> DraftPlan | None:
        bucket.looks, bucket.looked_at, selector._look = 1, 0, None
        bucket.lost, bucket.lost_plain = lost, lost_plain
        bucket.seen.forget(0.0)
        selector._seen.forget(0.0)
        plan = selector._chosen(4)
        return None if selector._look is None else plan

    draft = looks_at(0.0, 1e9)
    assert draft not in (None, OFF)
    assert looks_at(1e9, 0.0) == OFF
    assert looks_at(1e9, 1e9) is None


@pytest.mark.parametrize("acceptance", [0.3, 0.95])
def test_a_look_is_charged_what_it_is_believed_to_lose(acceptance: float) -> None:
    selector = CostModelSelector(PLANS)
    simulate(selector, [4] * 300, acceptance=lambda _: acceptance)
    bucket, plan = selector._buckets[4], PLANS[-1]
    rates = selector._rates(4)
    for looked, current in ((plan, OFF), (OFF, plan)):
        bucket.current, bucket.lost, bucket.lost_plain = current, 0.0, 0.0
        begun = bucket.seen.steps - 4
        selector._look = _Look(looked, bucket, begun, bucket.seen.steps, tour=False)
        bucket.looked_at = bucket.seen.steps  # no other look begins
        selector._chosen(4)
        worse = max(0.0, 1 - rates[looked] / rates[current])
        lost = 4 * worse * selector._costs.seconds(4, looked, 4)
        assert (bucket.lost, bucket.lost_plain) == pytest.approx(
            (lost, 0.0) if looked == plan else (0.0, lost)
        )
    assert (rates[plan] > rates[OFF]) is (acceptance > 0.5)


def test_what_a_look_has_to_take_in_is_counted_as_lost() -> None:
    selector = CostModelSelector(PLANS)
    simulate(selector, [4] * 300, acceptance=lambda _: 0.9, cost=_even, seed=1)
    bucket = selector._buckets[4]
    assert bucket.current == OFF
    bucket.seen.forget(0.0)
    selector._seen.forget(0.0)
    selector._rest.missed = 30.0
    beginning = selector._rest.cost(selector._row(4))
    allowed = selector._allowed(4)
    assert 0 < beginning < allowed
    for lost, looks in ((allowed - 0.5 * beginning, False), (allowed - 1.5 * beginning, True)):
        bucket.looks, bucket.looked_at, selector._look = 1, 0, None
        bucket.lost, bucket.lost_plain = lost, 1e9
        assert (selector._chosen(4) != OFF) is looks
        assert bucket.lost == pytest.approx(lost + looks * beginning)


def test_beyond_the_threshold_no_look_goes_on() -> None:
    # Both sizes are measured together.
    selector = CostModelSelector(PLANS, bs_threshold=5)
    sizes = [5] * 30 + [5, 6] * 500
    _, _, plans = simulate(selector, sizes, acceptance=lambda _: 0.9)
    assert {plan for size, plan in zip(sizes, plans, strict=True) if size == 6} == {OFF}
    assert sum(plan != OFF for plan in plans) > 100


def _resting() -> CostModelSelector:
    """It has not drafted for a while, and short steps go by without a thought."""
    selector = CostModelSelector(PLANS)
    short = lambda running, drafts: 1e-3 * (1 + drafts)  # noqa: E731
    simulate(selector, [16, 4] * 200, acceptance=lambda _: 0.0, cost=short)
    off = StepRecord(running=8, plan=OFF, seconds=2e-3)
    slept_through(selector, [off] * 60)
    selector._rest.batch(8, 8)
    assert selector._rest.missed > 0
    for size in (4, 16):
        bucket = selector._buckets[size]
        bucket.decide_at, bucket.thoughts = 0, 1e6
    selector._look = None
    return selector


def test_new_requests_are_a_reason_to_think_where_it_was_too_late_for_the_old_ones() -> None:
    for rests in (False, True):
        selector = _resting()
        selector._buckets[16].rests = rests
        selector.select(16)
        assert selector._asleep is not rests


def test_no_drafts_begin_without_a_thought() -> None:
    for current in (OFF, PLANS[0]):
        selector = _resting()
        selector._buckets[4].current = current
        selector.select(4)
        assert selector._asleep is (current == OFF)


def tree_world(
    selector: StrategySelector,
    running: int,
    steps: int,
    tree_gains: float,
    seed: int = 0,
    *,
    wrong: float = 0.35,
    row: float = 0.02,
) -> list[DraftPlan]:
    """Plans of steps on a machine where a row more takes `row` of three milliseconds; drafts of
    chains are `wrong` so often, those of trees as if there were `tree_gains` of them."""
    rng, plans = random.Random(seed), list[DraftPlan]()
    for _ in range(steps):
        plan = selector.select(running)
        milliseconds = 3.0 + row * running * (plan.verify_tokens + 0.3 * plan.draft_rows)
        milliseconds += 0.2 + 0.1 * plan.steps if plan != OFF else 0.0
        accepted, straight = list[int](), list[tuple[int, int]]()
        for _ in range(running if plan != OFF else 0):
            luck = [rng.random() for _ in range(plan.steps)]
            alone, among = (
                next((i for i, lot in enumerate(luck) if lot < chance), plan.steps)
                for chance in (wrong, wrong**tree_gains)
            )
            accepted.append(alone if plan.topk == 1 else among)
            straight += [(plan.steps, min(alone, among))] if plan.topk > 1 else []
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
def test_trees_are_taken_where_they_pay(tree_gains: float, tree: bool, running: int) -> None:
    found = []
    for seed in range(5):
        selector = CostModelSelector([*PLANS, DraftPlan(6, 3, 10), DraftPlan(6, 4, 16)])
        plans = tree_world(selector, running, 900, tree_gains, seed)
        found += [plan.topk > 1 for plan in plans[-200:]]
    assert (mean(found) > 0.8) is tree
    assert (mean(found) < 0.2) is not tree


def test_what_trees_yield_tells_what_chains_might() -> None:
    # As long as only trees are tried, chains of a very good head must not be held to be like any.
    found = []
    for seed in range(5):
        trees = map(DraftPlan.parse, ("4_2_8", "6_2_12", "6_4_16"))
        selector = CostModelSelector([DraftPlan.chain(11), *trees])
        plans = tree_world(selector, 1, 600, 2.0, seed, wrong=0.04)
        found += [plan == DraftPlan.chain(11) for plan in plans[200:]]
    assert mean(found) > 0.8


@pytest.mark.parametrize("running", [1, 8])
def test_a_draft_is_worth_its_row_where_rows_are_cheap(running: int) -> None:
    plans = [*PLANS, DraftPlan(6, 3, 10), DraftPlan(3, 3, 8), DraftPlan(4, 4, 16)]
    found = []
    for row in (0.02, 0.3):
        selector, rng = CostModelSelector(plans), random.Random(0)
        for step in range(600):
            # In turns, for what is chosen teaches less.
            selector.select(running)
            plan = [OFF, *plans][step // 8 % (1 + len(plans))]
            taken = 3.0 + row * running * plan.verify_tokens + 0.1 * plan.steps
            drafts = [plan.verify_tokens - 1] * running if plan != OFF else []
            seconds = 1e-3 * taken * math.exp(rng.gauss(0, 0.03))
            told = StepRecord(
                running=running,
                plan=plan,
                seconds=seconds,
                drafted=drafts,
                accepted=[2] * len(drafts),
            )
            selector.record(told)
        selector._remember()
        selector._learn()
        selector._chosen(running)
        found.append(selector.min_acceptance(running))
    cheap, dear = found
    # Of a row's time as many tokens come as of any time.
    assert 0 <= cheap < 0.08
    assert 0.08 < dear <= 0.9


def cut_tree(plan: DraftPlan, running: int, drafts: int) -> StepRecord:
    """A step of 3 ms and 0.1 ms for each row, of which so many drafts of a request are verified."""
    seconds = 3e-3 + 1e-4 * running * (1 + drafts)
    counts = [drafts] * running if drafts else []
    return StepRecord(
        running=running, plan=plan, seconds=seconds, drafted=counts, accepted=[0] * len(counts)
    )


@pytest.mark.parametrize("asleep", [False, True])
def test_a_tree_of_which_drafts_were_left_out_teaches_what_its_rows_take(asleep: bool) -> None:
    """Of its plan's rows it verified a fifth and a third: a tree that was never tried takes what
    all of its rows do."""
    plan, other = DraftPlan(6, 4, 24), DraftPlan(6, 4, 16)
    selector = CostModelSelector([*PLANS, plan, other])
    for _ in range(60):
        for step in (
            *[cut_tree(OFF, 4, 0)] * 5,
            *[cut_tree(PLANS[2], 4, 3)] * 3,
            *[cut_tree(plan, 4, 4)] * 3,
            *[cut_tree(plan, 4, 7)] * 3,
        ):
            # As if each took so long that it is measured although it is thought about.
            told = StepRecord(
                running=4,
                plan=step.plan,
                seconds=1e3 * step.seconds,
                drafted=step.drafted,
                accepted=step.accepted,
            )
            selector._asleep = asleep
            selector.record(told)
        slept_through(selector, [])
        selector._asleep = False
    found = selector._costs.seconds(4, other, 4)
    assert found == pytest.approx(1e3 * (3e-3 + 1e-4 * 4 * 16), rel=0.15)


def test_a_tree_of_which_nothing_was_left_is_no_step_without_drafts() -> None:
    plan = DraftPlan(6, 4, 16)
    for asleep in (False, True):
        selector = CostModelSelector([*PLANS, plan])
        for _ in range(100):
            for step in (
                *[StepRecord(running=2, plan=OFF, seconds=1.0)] * 6,
                # The drafter has taken its time.
                *[StepRecord(running=2, plan=plan, seconds=1.5)] * 2,
            ):
                selector._asleep = asleep
                selector.record(step)
            slept_through(selector, [])
        assert selector._costs.seconds(2, OFF, 2) == pytest.approx(1.0, rel=0.02)
        assert selector._costs.seconds(2, plan, 2, 0.0) == pytest.approx(1.5, rel=0.05)
        drafts, accepted = selector._of_tree(2, plan)
        assert drafts < 1
        assert accepted < 0.5


def test_what_was_seen_of_trees_fades_while_chains_are_drafted() -> None:
    plan, chain = DraftPlan(4, 2, 8), PLANS[2]
    selector = CostModelSelector([*PLANS, plan])
    right = [3] * 4

    def told(of: DraftPlan, accepted: list[int]) -> StepRecord:
        drafted = [of.verify_tokens - 1] * 4
        return StepRecord(running=4, plan=of, seconds=1.0, drafted=drafted, accepted=accepted)

    for _ in range(100):
        selector.record(told(chain, right))
    before = selector._of_tree(4, plan)[1]
    for _ in range(50):
        selector.record(told(plan, [0] * 4))
    after = selector._of_tree(4, plan)[1]
    assert after < 0.5 * before
    for _ in range(4000):
        selector.record(told(chain, right))
    assert selector._of_tree(4, plan)[1] > 0.7 * before


@pytest.mark.parametrize("asleep", [False, True])
def test_the_first_drafts_of_trees_tell_what_chains_would_do(asleep: bool) -> None:
    plan = DraftPlan(4, 3, 12)
    selector = CostModelSelector([*PLANS, plan])
    for _ in range(100):
        told = StepRecord(
            running=2,
            plan=plan,
            seconds=1.0,
            drafted=[11, 11],
            accepted=[3, 4],
            # Of three in a row two and none: one half is right at first, then all, then none.
            straight=[(3, 2), (3, 0)],
        )
        selector._asleep = asleep
        selector.record(told)
        slept_through(selector, [])
    assert selector._shares(2, 3) == pytest.approx([0.5, 1.0, 0.0], abs=0.1)
    # Siblings are right where they are not.
    assert selector._of_tree(2, plan)[1] == pytest.approx(3.5, abs=0.3)
