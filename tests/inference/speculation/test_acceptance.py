"""Acceptance rates by depth, and of trees."""

from __future__ import annotations

import pytest

from slipstream.inference.speculation.acceptance import (
    AcceptanceCurve,
    TreeRatios,
    sum_of_best,
    tree_probabilities,
)
from slipstream.inference.speculation.plan import DraftPlan


def test_the_curve_is_per_depth_and_extends_beyond_tried_depths() -> None:
    curve = AcceptanceCurve(kept=1e12, guess_weight=1e-9)
    for _ in range(10):
        curve.record([2, 2, 2, 2], [0, 1, 2, 2])
    assert curve.rates(1)[-1] == pytest.approx(3 / 4)
    assert curve.rates(2)[-1] == pytest.approx(2 / 3)
    assert curve.rates(6)[-1] == pytest.approx(2 / 3)
    assert curve.expected(2) == pytest.approx(3 / 4 + 1 / 2)


def test_acceptance_probabilities_of_a_small_tree() -> None:
    # .6; its child .6 * .5; its sibling .4 * .8 * .6 = .192, whose child has .096; the sibling of
    # .3: .6 * .5 * .8 * .5 = .12.
    found = tree_probabilities((0.6, 0.5), DraftPlan(2, 2, 6))
    assert found == pytest.approx((0.6, 0.3, 0.192, 0.12, 0.096))
    # A third candidate shares what the first two leave over: .4 * .52 * .48.
    assert tree_probabilities((0.6,), DraftPlan(1, 3, 4)) == pytest.approx((0.6, 0.192, 0.09984))
    assert tree_probabilities((0.6, 0.5), DraftPlan(2, 2, 3)) == pytest.approx((0.6, 0.3))
    assert sum_of_best(found, 2.5) == pytest.approx(0.6 + 0.3 + 0.096)
    assert sum_of_best(found, 5) == pytest.approx(sum(found))
    assert sum_of_best(found, 0) == 0


def test_a_new_tree_has_the_ratio_of_all_trees() -> None:
    ratios, seen, new = TreeRatios(trust=10.0), DraftPlan(4, 2, 8), DraftPlan(6, 4, 16)
    assert ratios.ratio(new) == 1
    for _ in range(2000):
        ratios.record(seen, 3.0, 2.0, 4)
    assert ratios.ratio(seen) == pytest.approx(1.5, abs=0.02)
    assert 1.4 < ratios.ratio(new) < 1.5
    for _ in range(3):
        ratios.record(new, 1.0, 2.0, 1)
    assert 1.1 < ratios.ratio(new) < 1.4
    ratios.forget(1e-6)
    assert ratios.ratio(seen) == pytest.approx(1, abs=0.01)


def test_steps_recorded_together_or_one_by_one_give_the_same_ratio() -> None:
    together, alone, plan = TreeRatios(), TreeRatios(), DraftPlan(4, 2, 8)
    for accepted in (3.0, 1.0):
        for _ in range(20):
            together.record(plan, accepted, 2.0, 4 * 30, steps=30)
            for _ in range(30):
                alone.record(plan, accepted, 2.0, 4)
        assert together.ratio(plan) == pytest.approx(alone.ratio(plan), rel=0.02)
    # Only the last steps still count.
    assert together.ratio(plan) < 0.6
