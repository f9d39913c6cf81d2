"""Which candidates are verified: a budget for the whole batch."""

from __future__ import annotations

import numpy as np

from slipstream.sampling.tree import Candidates

NONE = -np.inf


def candidates(*scores: list[float]) -> Candidates:
    """Two after the root, two after the first of these, one after the second."""
    found = Candidates.room(len(scores), 5)
    found.tokens_NC[:] = [10, 11, 12, 13, 14]
    found.parents_NC[:] = [-1, -1, 0, 0, 1]
    found.scores_NC[:] = scores
    return found


def test_the_batch_shares_its_budget() -> None:
    sure, unsure = [-0.1, -2.0, -0.2, -3.0, -2.5], [-1.5, -1.6, -2.6, -3.1, -4.0]
    found = list(candidates(sure, unsure).best(4))
    assert found == [([10, 12], [0, 1]), ([10, 11], [0, 0])]
    assert list(candidates(sure, unsure).best(2)) == [([10, 12], [0, 1]), ([], [])]
    assert list(candidates(sure, unsure).best(0)) == [([], []), ([], [])]


def test_parents_come_first_among_equals() -> None:
    equal = [-0.5, -2.0, -0.5, -0.5, -2.0]
    assert list(candidates(equal).best(1)) == [([10], [0])]
    assert list(candidates(equal).best(3)) == [([10, 12, 13], [0, 1, 1])]
    assert list(candidates(equal).best(4)) == [([10, 11, 12, 13], [0, 0, 1, 1])]
    assert list(candidates(equal).best(9)) == [([10, 11, 12, 13, 14], [0, 0, 1, 1, 2])]


def test_what_has_no_chance_is_left_out() -> None:
    few = [-0.5, NONE, -0.6, NONE, NONE]
    for budget in (4, 5, 6):
        assert list(candidates(few, few).best(budget)) == [([10, 12], [0, 1])] * 2
