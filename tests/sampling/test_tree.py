"""Selection of draft-tree candidates under a budget for the whole batch."""

from __future__ import annotations

import numpy as np

from slipstream.sampling.tree import Candidates, GrowingTree, best_nodes

NONE = -np.inf


def candidates(*scores: list[float]) -> Candidates:
    """Return trees with two children of the root, two of the first child, and one of the second."""
    count = len(scores)
    return Candidates(
        np.tile([10, 11, 12, 13, 14], (count, 1)),
        np.tile([-1, -1, 0, 0, 1], (count, 1)),
        np.array(scores),
        np.zeros((count, 2)),
    )


def best(drafts: int, *scores: list[float]) -> list[tuple[list[int], list[int]]]:
    """Return tokens and parents of the selected candidates."""
    return [selected[:2] for selected in candidates(*scores).best(drafts)]


def test_all_requests_of_a_batch_share_the_budget() -> None:
    likely, unlikely = [-0.1, -2.0, -0.2, -3.0, -2.5], [-1.5, -1.6, -2.6, -3.1, -4.0]
    assert best(4, likely, unlikely) == [([10, 12], [0, 1]), ([10, 11], [0, 0])]
    assert best(2, likely, unlikely) == [([10, 12], [0, 1]), ([], [])]
    assert best(0, likely, unlikely) == [([], []), ([], [])]
    (*_, scores, _), _ = candidates(likely, unlikely).best(2)
    assert scores == [-0.1, -0.2]


def test_candidates_below_the_minimum_score_are_not_selected() -> None:
    likely, unlikely = [-0.1, -2.0, -0.2, -3.0, -2.5], [-1.5, -1.6, -2.6, -3.1, -4.0]
    tokens = [selected[0] for selected in candidates(likely, unlikely).best(9, least=-1.5)]
    assert tokens == [[10, 12], [10]]


def test_the_first_child_that_is_left_out_is_reported() -> None:
    likely, unlikely = [-0.1, -2.0, -0.2, -3.0, -2.5], [-1.5, -1.6, -2.6, -3.1, -4.0]

    def left_out(drafts: int, least: float = NONE) -> list[int | None]:
        return [found for *_, found in candidates(likely, unlikely).best(drafts, least)]

    # Node 10 has the children 12 and 13, which have none.
    assert left_out(0) == [10, 10]
    assert left_out(1) == [12, 10]
    assert left_out(4) == [None, 12]
    assert left_out(9, least=-1.5) == [None, 12]
    # A candidate with a score of -inf was not drafted.
    few = [-0.5, NONE, NONE, NONE, NONE]
    assert [found for *_, found in candidates(few).best(9)] == [None]


def test_parents_come_first_among_equal_scores() -> None:
    equal = [-0.5, -2.0, -0.5, -0.5, -2.0]
    assert best(1, equal) == [([10], [0])]
    assert best(3, equal) == [([10, 12, 13], [0, 1, 1])]
    assert best(4, equal) == [([10, 12, 13, 11], [0, 1, 1, 0])]


def test_nodes_are_in_depth_first_order_with_the_best_child_first() -> None:
    equal = [-0.5, -2.0, -0.5, -0.5, -2.0]
    assert best(9, equal) == [([10, 12, 13, 11, 14], [0, 1, 1, 0, 4])]
    deep = Candidates(
        np.arange(20, 28)[None],
        np.array([[-1, -1, 0, 0, 1, 1, 3, 2]]),
        -np.arange(8.0)[None],
        np.zeros((1, 2)),
    )
    ((tokens, parents, scores, left_out),) = deep.best(8)
    assert left_out is None
    assert tokens == [20, 22, 27, 23, 26, 21, 24, 25]
    assert parents == [0, 1, 2, 1, 4, 0, 6, 6]
    assert scores == [0.0, -2.0, -7.0, -3.0, -6.0, -1.0, -4.0, -5.0]


def test_candidates_with_a_score_of_minus_infinity_are_not_selected() -> None:
    few = [-0.5, NONE, -0.6, NONE, NONE]
    for budget in (4, 5, 6):
        assert best(budget, few, few) == [([10, 12], [0, 1])] * 2


def test_a_path_is_merged_into_a_tree_by_its_tokens() -> None:
    tree = GrowingTree.of([5, 10, 11, 12], [-1, 0, 0, 1], [-0.5, -1.0, -0.9])
    tree.add([10, 13, 12], [-0.2, -0.3, -0.4])
    assert tree.tokens == [5, 10, 11, 12, 13, 12]
    assert tree.parents == [-1, 0, 0, 1, 1, 4]
    assert tree.scores == [0.0, -0.2, -1.0, -0.9, -0.3, -0.4]
    tree.add([11], [-3.0])
    assert tree.scores[2] == -1.0
    tree.add([], [])
    other = GrowingTree.of([6], [-1], [])
    assert best_nodes([tree, other], 3) == [[0, 1, 4, 5], [0]]
    part = tree.part([0, 1, 4, 5])
    assert part == GrowingTree([5, 10, 13, 12], [-1, 0, 1, 2], [0.0, -0.2, -0.3, -0.4])
    # Nodes 1 and 3 are the first children.
    kept = [0, 2], [0, 1], [0, 1, 4, 5], [0, 1, 3, 4]
    assert [tree.next_left_out(nodes, 99) for nodes in kept] == [10, 12, 12, 99]
    assert other.next_left_out([0], None) is None
    other.add([7], [-0.35])
    assert best_nodes([tree, other], 3) == [[0, 1, 4], [0, 1]]
    assert best_nodes([tree, other], 0) == [[0], [0]]
    # If one tree is full, the rest of the budget goes to the others.
    assert best_nodes([tree, other], 3, most=1) == [[0, 1], [0, 1]]


def test_best_of_each_selects_the_same_number_for_every_request() -> None:
    # With a shared budget, the first request would get all drafts.
    scores = np.array([[-0.1, -0.2, -0.3], [-5.0, -6.0, -7.0]])
    candidates = Candidates(
        tokens_NC=np.array([[1, 2, 3], [4, 5, 6]]),
        parents_NC=np.full((2, 3), -1),
        scores_NC=scores,
        gaps_NW=np.zeros((2, 1)),
    )
    assert [tokens for tokens, *_ in candidates.best(3)] == [[1, 2, 3], []]
    assert [tokens for tokens, *_ in candidates.best_of_each(2)] == [[1, 2], [4, 5]]
    assert [tokens for tokens, *_ in candidates.best_of_each(2, -5.5)] == [[1, 2], [4]]
