"""Which candidates are verified: a budget for the whole batch."""

from __future__ import annotations

import numpy as np

from slipstream.sampling.tree import Branches, Candidates, best_branches

NONE = -np.inf


def candidates(*scores: list[float]) -> Candidates:
    """Two after the root, two after the first of these, one after the second."""
    count = len(scores)
    return Candidates(
        np.tile([10, 11, 12, 13, 14], (count, 1)),
        np.tile([-1, -1, 0, 0, 1], (count, 1)),
        np.array(scores),
        np.zeros((count, 2)),
    )


def best(drafts: int, *scores: list[float]) -> list[tuple[list[int], list[int]]]:
    """Tokens and parents."""
    return [found[:2] for found in candidates(*scores).best(drafts)]


def test_the_batch_shares_its_budget() -> None:
    sure, unsure = [-0.1, -2.0, -0.2, -3.0, -2.5], [-1.5, -1.6, -2.6, -3.1, -4.0]
    assert best(4, sure, unsure) == [([10, 12], [0, 1]), ([10, 11], [0, 0])]
    assert best(2, sure, unsure) == [([10, 12], [0, 1]), ([], [])]
    assert best(0, sure, unsure) == [([], []), ([], [])]
    (*_, scores), _ = candidates(sure, unsure).best(2)
    assert scores == [-0.1, -0.2]


def test_what_is_not_worth_its_row_is_left_out() -> None:
    sure, unsure = [-0.1, -2.0, -0.2, -3.0, -2.5], [-1.5, -1.6, -2.6, -3.1, -4.0]
    found = [kept[0] for kept in candidates(sure, unsure).best(9, least=-1.5)]
    assert found == [[10, 12], [10]]


def test_parents_come_first_among_equals() -> None:
    equal = [-0.5, -2.0, -0.5, -0.5, -2.0]
    assert best(1, equal) == [([10], [0])]
    assert best(3, equal) == [([10, 12, 13], [0, 1, 1])]
    assert best(4, equal) == [([10, 12, 13, 11], [0, 1, 1, 0])]


def test_a_tree_is_a_walk_with_the_best_child_first() -> None:
    equal = [-0.5, -2.0, -0.5, -0.5, -2.0]
    assert best(9, equal) == [([10, 12, 13, 11, 14], [0, 1, 1, 0, 4])]
    deep = Candidates(
        np.arange(20, 28)[None],
        np.array([[-1, -1, 0, 0, 1, 1, 3, 2]]),
        -np.arange(8.0)[None],
        np.zeros((1, 2)),
    )
    ((tokens, parents, scores),) = deep.best(8)
    assert tokens == [20, 22, 27, 23, 26, 21, 24, 25]
    assert parents == [0, 1, 2, 1, 4, 0, 6, 6]
    assert scores == [0.0, -2.0, -7.0, -3.0, -6.0, -1.0, -4.0, -5.0]


def test_what_has_no_chance_is_left_out() -> None:
    few = [-0.5, NONE, -0.6, NONE, NONE]
    for budget in (4, 5, 6):
        assert best(budget, few, few) == [([10, 12], [0, 1])] * 2


def test_a_path_is_merged_by_its_tokens() -> None:
    tree = Branches.of([5, 10, 11, 12], [-1, 0, 0, 1], [-0.5, -1.0, -0.9])
    tree.add([10, 13, 12], [-0.2, -0.3, -0.4])
    assert tree.tokens == [5, 10, 11, 12, 13, 12]
    assert tree.parents == [-1, 0, 0, 1, 1, 4]
    assert tree.scores == [0.0, -0.2, -1.0, -0.9, -0.3, -0.4]
    tree.add([11], [-3.0])
    assert tree.scores[2] == -1.0
    tree.add([], [])
    other = Branches.of([6], [-1], [])
    assert best_branches([tree, other], 3) == [[0, 1, 4, 5], [0]]
    part = tree.part([0, 1, 4, 5])
    assert part == Branches([5, 10, 13, 12], [-1, 0, 1, 2], [0.0, -0.2, -0.3, -0.4])
    other.add([7], [-0.35])
    assert best_branches([tree, other], 3) == [[0, 1, 4], [0, 1]]
    assert best_branches([tree, other], 0) == [[0], [0]]
    # What one has no room for goes to the others.
    assert best_branches([tree, other], 3, most=1) == [[0, 1], [0, 1]]


def test_where_rows_are_a_matrix_each_has_its_own_best() -> None:
    # By itself the first would have all of them.
    scores = np.array([[-0.1, -0.2, -0.3], [-5.0, -6.0, -7.0]])
    candidates = Candidates(
        tokens_NC=np.array([[1, 2, 3], [4, 5, 6]]),
        parents_NC=np.full((2, 3), -1),
        scores_NC=scores,
        gaps_NW=np.zeros((2, 1)),
    )
    assert [tokens for tokens, _, _ in candidates.best(3)] == [[1, 2, 3], []]
    assert [tokens for tokens, _, _ in candidates.best_of_each(2)] == [[1, 2], [4, 5]]
    assert [tokens for tokens, _, _ in candidates.best_of_each(2, -5.5)] == [[1, 2], [4]]
