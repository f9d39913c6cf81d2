"""How often drafts are right, by depth."""

from __future__ import annotations

import pytest

from slipstream.inference.speculation.acceptance import (
    AcceptanceCurve,
    TreeYields,
    best_of,
    chances_of_tree,
)
from slipstream.inference.speculation.plan import DraftPlan


def test_the_curve_is_per_depth_and_extends_beyond_what_was_tried() -> None:
    curve = AcceptanceCurve(kept=1e12, guess_weight=1e-9)
    for _ in range(10):
        curve.record([2, 2, 2, 2], [0, 1, 2, 2])
    assert curve.rates(1)[-1] == pytest.approx(3 / 4)
    assert curve.rates(2)[-1] == pytest.approx(2 / 3)
    assert curve.rates(6)[-1] == pytest.approx(2 / 3)
    assert curve.expected(2) == pytest.approx(3 / 4 + 1 / 2)


def test_chances_of_the_nodes_of_a_tree_by_hand() -> None:
    # .6; after it .6 * .5; beside it .4 * .8 * .6 = .192, and after that .096; beside .3: .6 * .5 *
    # .8 * .5 = .12.
    found = chances_of_tree((0.6, 0.5), DraftPlan(2, 2, 6))
    assert found == pytest.approx((0.6, 0.3, 0.192, 0.12, 0.096))
    # Of a third candidate what the first two leave over: .4 * .52 * .48.
    assert chances_of_tree((0.6,), DraftPlan(1, 3, 4)) == pytest.approx((0.6, 0.192, 0.09984))
    assert chances_of_tree((0.6, 0.5), DraftPlan(2, 2, 3)) == pytest.approx((0.6, 0.3))
    assert best_of(found, 2.5) == pytest.approx(0.6 + 0.3 + 0.096)
    assert best_of(found, 5) == pytest.approx(sum(found))
    assert best_of(found, 0) == 0


def test_a_tree_yields_what_all_do_until_it_has_been_seen_often() -> None:
    yields, seen, new = TreeYields(trust=10.0), DraftPlan(4, 2, 8), DraftPlan(6, 4, 16)
    assert yields.share(new) == 1
    for _ in range(2000):
        yields.record(seen, 3.0, 2.0, 4)
    assert yields.share(seen) == pytest.approx(1.5, abs=0.02)
    assert 1.4 < yields.share(new) < 1.5
    for _ in range(3):
        yields.record(new, 1.0, 2.0, 1)
    assert 1.1 < yields.share(new) < 1.4
    yields.forget(1e-6)
    assert yields.share(seen, 0.8) == pytest.approx(0.8, abs=0.01)


def test_steps_of_trees_told_together_count_as_those_told_one_by_one() -> None:
    together, alone, plan = TreeYields(), TreeYields(), DraftPlan(4, 2, 8)
    for accepted in (3.0, 1.0):
        for _ in range(20):
            together.record(plan, accepted, 2.0, 4 * 30, steps=30)
            for _ in range(30):
                alone.record(plan, accepted, 2.0, 4)
        assert together.share(plan) == pytest.approx(alone.share(plan), rel=0.02)
    # Only what came last still counts.
    assert together.share(plan) < 0.6
