"""Predicted seconds of steps."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from slipstream.inference.speculation.costs import StepCosts, _non_negative
from slipstream.inference.speculation.plan import OFF, DraftPlan

TWO = DraftPlan.chain(2)


def test_steps_recorded_together_or_one_by_one_give_the_same_prediction() -> None:
    together, alone = StepCosts(), StepCosts()
    rng = random.Random(0)
    for _ in range(60):
        steps = [(4, 2e-3 * math.exp(rng.gauss(0, 0.05))) for _ in range(8)]
        together.record(4, OFF, steps)
        for step in steps:
            alone.record(4, OFF, [step])
    assert together.seconds(4, OFF, 4) == pytest.approx(alone.seconds(4, OFF, 4), rel=0.02)
    assert together.seconds(4, OFF, 4) == pytest.approx(2e-3, rel=0.03)


def test_a_slow_first_step_has_little_effect() -> None:
    costs = StepCosts()
    for seconds in (20e-3, *[2e-3] * 20):
        costs.record(2, OFF, [(2, seconds)])
    # Drafts were never measured: the prior says about a quarter more than a plain step.
    assert costs.seconds(2, DraftPlan.chain(1), 2) == pytest.approx(1.24 * 2e-3, rel=0.25)


def test_weights_are_never_negative() -> None:
    rng = np.random.default_rng(0)
    clipped = 0
    for _ in range(300):
        rows, targets = rng.normal(size=(9, 6)), rng.normal(size=9)
        left, right = rows.T @ rows, rows.T @ targets
        found = _non_negative(left, right)
        assert (found >= 0).all()
        # The positive weights are a least squares solution of their own.
        slope = left @ found - right
        assert np.abs(slope[found > 0]).max(initial=0.0) < 1e-8
        clipped += (found == 0).sum()
    assert clipped > 300


def test_one_disturbed_step_among_others_counts_little() -> None:
    costs = StepCosts()
    for _ in range(20):
        costs.record(8, OFF, [(8, 0.01)] * 3)
    costs.record(8, TWO, [(8, 0.013), (8, 0.065), (8, 0.013)])
    assert costs.seconds(8, TWO, 8) < 1.2 * 0.013


def test_ratios_between_plans_are_learned_while_the_machine_speed_changes() -> None:
    # All steps are up to twice as slow for a while. Steps with drafts cost 1.5 times as much as
    # plain ones, and twice as much in one bucket.
    rng, costs, speed = random.Random(1), StepCosts(), 1.0
    for number in range(400):
        if number % 3 == 0:
            speed = math.exp(rng.uniform(0, math.log(2)))
        bucket, plan = (8, 16)[number // 2 % 2], (OFF, TWO)[number % 2]
        factor = 1.0 if plan == OFF else 2.0 if bucket == 16 else 1.5
        costs.record(bucket, plan, [(bucket, 4e-3 * factor * speed)] * 8)
    for bucket, factor in ((8, 1.5), (16, 2.0)):
        ratio = costs.seconds(bucket, TWO, bucket) / costs.seconds(bucket, OFF, bucket)
        assert ratio == pytest.approx(factor, rel=0.15)


def test_chains_predict_the_cost_of_trees() -> None:
    # Chains of several depths and batch sizes show the cost of a token in either model.
    costs, rng = StepCosts(), random.Random(2)

    def seconds(running: int, plan: DraftPlan) -> float:
        draft = 0.3e-3 + 0.1e-3 * plan.steps + 4e-6 * running * plan.draft_rows
        rows = running * plan.verify_tokens
        return 2e-3 + 40e-6 * rows + 30e-6 * max(rows - 8, 0) + (draft if plan != OFF else 0.0)

    for _ in range(400):
        running, plan = rng.choice([1, 2, 4, 8]), DraftPlan.chain(rng.choice([0, 1, 3, 5, 7]))
        costs.record(running, plan, [(running, seconds(running, plan))])
    for running, plan in ((1, DraftPlan(5, 4, 16)), (4, DraftPlan(3, 2, 8))):
        assert costs.seconds(running, plan, running) == pytest.approx(
            seconds(running, plan), rel=0.12
        )


def machine(running: int, plan: DraftPlan, drafts: float | None = None) -> float:
    """Seconds of a step that verifies `drafts` draft tokens per request."""
    rows = running * (plan.verify_tokens if drafts is None else 1 + drafts)
    return 3e-3 + 2e-5 * rows + (3e-4 + 2e-4 * plan.steps if plan != OFF else 0.0)


TALL, BROAD = DraftPlan(6, 4, 24), DraftPlan(6, 4, 16)


def test_trees_with_drafts_left_out_cost_what_their_tokens_do() -> None:
    costs, rng = StepCosts(), random.Random(3)
    for _ in range(400):
        running, plan = rng.choice([2, 4]), rng.choice([OFF, DraftPlan.chain(3), TALL])
        drafts = rng.choice([4.0, 7.0]) if plan == TALL else None
        taken = machine(running, plan, drafts) * math.exp(rng.gauss(0, 0.03))
        costs.record(running, plan, [(running, taken)], drafts=drafts)
    for drafts in (5.0, 23.0):
        assert costs.seconds(4, TALL, 4, drafts) == pytest.approx(machine(4, TALL, drafts), rel=0.1)
    assert costs.seconds(4, BROAD, 4) == pytest.approx(machine(4, BROAD), rel=0.1)


def test_the_bound_of_a_tokens_cost_is_low_until_plans_differ_in_tokens_alone() -> None:
    costs, rng, token_cost = StepCosts(), random.Random(4), 2e-5

    def measure(plan: DraftPlan) -> None:
        taken = 4e-3 + token_cost * 4 * plan.verify_tokens + 2e-4 * plan.steps
        costs.record(4, plan, [(4, taken * math.exp(rng.gauss(0, 0.02)))])

    chains = [DraftPlan.chain(depth) for depth in (0, 1, 2, 3, 5, 7)]
    for _ in range(40):
        for plan in chains:
            measure(plan)
    # Each draft of a chain adds a token and a pass of the drafter: either may be expensive.
    assert costs.token_at_least(4, BROAD) < 2 * token_cost
    for _ in range(200):
        for plan in (*chains, DraftPlan(4, 2, 8), BROAD, TALL, DraftPlan(3, 3, 16)):
            measure(plan)
    assert 0.5 * token_cost < costs.token_at_least(4, BROAD) < 1.1 * token_cost


def test_the_cost_of_a_token_is_constant_beyond_the_measured_range() -> None:
    def seconds(running: int, plan: DraftPlan) -> float:
        return machine(running, plan) + 4e-5 * max(running * plan.verify_tokens - 90, 0)

    costs, rng = StepCosts(), random.Random(5)

    def measure(sizes: list[int], plans: list[DraftPlan]) -> None:
        for _ in range(300):
            running, plan = rng.choice(sizes), rng.choice(plans)
            taken = seconds(running, plan) * math.exp(rng.gauss(0, 0.02))
            costs.record(running, plan, [(running, taken)])

    few = [OFF, DraftPlan.chain(3), DraftPlan(3, 3, 12), DraftPlan(4, 2, 8)]
    measure([1, 2, 4], few)
    # 192 tokens.
    assert costs.seconds(8, TALL, 8) == pytest.approx(machine(8, TALL), rel=0.15)
    measure([1, 2, 4, 32, 64], few)
    for running in (2, 48):
        assert costs.seconds(running, DraftPlan(4, 2, 6), running) == pytest.approx(
            seconds(running, DraftPlan(4, 2, 6)), rel=0.15
        )
