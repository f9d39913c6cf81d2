"""Fixed plans in turns: which steps count, and how they are told apart."""

from __future__ import annotations

import random
from math import exp, log
from pathlib import Path

import numpy as np
import pytest

from slipstream.bench.record import Spread
from slipstream.bench.speculation import fixed_plans
from slipstream.bench.speculation.fixed_plans import SETTLED, TURN, apart
from slipstream.bench.speculation.rollout import SpeculationBench, plans
from slipstream.bench.speculation.trained import Responses
from slipstream.inference.speculation.plan import OFF, DraftPlan
from slipstream.inference.speculation.selector import StepRecord


def of_lengths(lengths: list[int]) -> Responses:
    return Responses([], [[0] * length for length in lengths])


def test_a_batch_of_few_has_longer_responses_where_there_are_any() -> None:
    bench, long = SpeculationBench(policy=Path("toy")), of_lengths([613] * 20 + [200] * 30)
    lengths = [fixed_plans._length(bench, long, size, 20) for size in (1, 4, 8, 16, 64)]
    assert lengths == [256, 256, 128, 64, 64]
    assert fixed_plans._length(bench, long, 4, 24) == 200
    assert fixed_plans._length(bench, of_lengths([50] * 24), 4, 24) == 64  # which are refused then


def test_plans_take_turns_of_which_settled_steps_of_full_batches_count() -> None:
    turns = fixed_plans._InterleavedPlans(2, plans())
    told = []
    for step in range(2 * len(plans()) * TURN):
        plan = turns.select(2)
        told.append(plan)
        drafted = [plan.steps] * 2 if plan != OFF else []
        running = 1 if step % TURN == TURN - 1 else 2
        record = StepRecord(
            running=running,
            plan=plan,
            seconds=1.0 + step,
            drafted=drafted[:running],
            accepted=drafted[:running],
        )
        turns.record(record)
    order = [*plans(), *reversed(plans())]
    assert told == [plan for plan in order for _ in range(TURN)]
    for plan in plans():
        first, second = turns.seconds[plan]
        assert len(first) == len(second) == TURN - SETTLED - 1
        assert turns.made[plan] == [1.0 + plan.steps] * len(first + second)
    # Where no drafts were made, though told so, it is no step of the plan's.
    while turns.select(2) == OFF:
        pass
    for _ in range(SETTLED):
        turns.select(2)
    turns.record(StepRecord(running=2, plan=OFF, seconds=1.0))
    assert turns.seconds[plans()[1]][-1] == []


def test_contenders_are_told_apart_by_less_than_the_machine_changes() -> None:
    # Between turns it may be twice as fast, and one contender in ten is disturbed.
    rng = random.Random(0)
    own = [0.0, log(1.04), -log(1.2)]
    logs = np.empty((3, 60))
    for turn in range(60):
        mood = rng.choice([0.0, log(2)])
        for i, true in enumerate(own):
            disturbed = 1.0 if rng.random() < 0.1 else 0.0
            logs[i, turn] = true + mood + disturbed + 0.03 * rng.gauss(0, 1)
    logs[1, 7] = np.nan
    found, error = apart(logs)
    for true, by in zip(own, found, strict=True):
        assert exp(by - found[0]) == pytest.approx(exp(true), rel=0.015)
    # 0.03 of noise in 60 turns.
    assert error == pytest.approx(1.2533 * 0.03 / 60**0.5, rel=0.35)


def test_a_plan_is_as_fast_as_what_it_yields_over_what_it_takes() -> None:
    plan = fixed_plans.Fixed(
        plan=DraftPlan.parse("3_1_4"),
        seconds=Spread.of([0.1]),
        steps_off=2.0,
        steps_off_error=0.01,
        accept_length=3.0,
        accept_length_error=0.1,
    )
    assert plan.over_off == 1.5
    assert plan.name == "3_1_4"


def test_the_error_of_a_mean_falls_with_what_was_counted() -> None:
    # A deviation of 2 / sqrt(3), by four values.
    assert fixed_plans._standard_error([1.0, 3.0, 1.0, 3.0]) == pytest.approx(3**-0.5)
    assert fixed_plans._standard_error([5.0]) == 0
