"""Properties of draft trees."""

from __future__ import annotations

import pytest

from slipstream.inference.speculation.protocol import DraftTree

#  0 - 1 - 2 - 3
#   \   \    \- 4
#    \   \- 5
#     \- 6 - 7
TREE = DraftTree(range(8), [-1, 0, 1, 2, 2, 1, 0, 6])


@pytest.mark.parametrize(
    ("path", "accepted"),
    [([0], 0), ([0, 1], 1), ([0, 1, 2, 3], 3), ([0, 1, 2, 4], 2), ([0, 1, 5], 1), ([0, 6, 7], 0)],
)
def test_accepted_drafts_of_the_chain_of_first_children(path: list[int], accepted: int) -> None:
    assert TREE.straight(path, [8] * len(path)) == (3, accepted)


def test_a_chain_consists_of_first_children() -> None:
    assert DraftTree.chain(9, [4, 5]).straight([0, 1], [4, 6]) == (2, 1)
    assert DraftTree([9, 4, 5], [-1, 0, 1]).straight([0, 1, 2], [4, 5, 6]) == (2, 2)
    assert DraftTree.chain(9, []).straight([0], [4]) == (0, 0)
    # A failed request has no accepted nodes.
    assert DraftTree.chain(9, [4]).straight([], []) == (1, 0)
    assert TREE.straight([], []) == (3, 0)


@pytest.mark.parametrize(
    ("path", "tokens", "found"),
    [
        ([0, 1, 2], [4, 5, 6], (3, 3)),  # The policy drew the token that was left out.
        ([0, 1, 2], [4, 5, 7], (3, 2)),
        ([0, 1, 2], [4, 5], (2, 2)),  # The request ended before it could be compared.
        ([0, 1], [4, 6], (2, 1)),  # It follows a draft that was rejected.
        ([0, 1, 3], [4, 7, 6], (2, 1)),  # The same, with an accepted sibling.
        ([], [], (2, 0)),
    ],
)
def test_a_draft_that_was_left_out_counts_if_it_can_be_compared(
    path: list[int], tokens: list[int], found: tuple[int, int]
) -> None:
    tree = DraftTree([9, 4, 5, 7], [-1, 0, 1, 1], left_out=6)
    assert tree.straight(path, tokens) == found


def test_is_first_child() -> None:
    assert [TREE.is_first_child(node) for node in range(1, 8)] == [1, 1, 1, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("tree", "depth"),
    [
        (DraftTree.chain(1, ()), 0),
        (DraftTree.chain(1, (2, 3)), 2),
        (DraftTree([1, 2, 3, 4], [-1, 0, 0, 2]), 2),
        (DraftTree([1, 2, 3, 4], [-1, 0, 0, 0]), 1),
    ],
)
def test_depth_of_a_tree(tree: DraftTree, depth: int) -> None:
    assert tree.depth == depth
