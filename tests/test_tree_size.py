"""`candidate_count` equals the number of nodes of a tree that is grown node by node."""

from __future__ import annotations

import pytest
import torch

from slipstream.inference.speculation.batched_trees import _parents
from slipstream.inference.speculation.plan import OFF, DraftPlan
from slipstream.kernels.draft import tree
from slipstream.tree_size import candidate_count

SHAPES = [(levels, topk) for levels in range(1, 6) for topk in range(1, 9)]


def grown(levels: int, topk: int) -> list[int]:
    """Candidates per level: each of at most `topk` expanded nodes has `topk` candidates."""
    followed, sizes = 1, []
    for _ in range(levels):
        candidates = sum(topk for _ in range(followed))
        sizes.append(candidates)
        followed = min(topk, candidates)
    return sizes


@pytest.mark.parametrize(("levels", "topk"), SHAPES)
def test_candidate_count_equals_a_tree_grown_node_by_node(levels: int, topk: int) -> None:
    sizes = grown(levels, topk)
    assert candidate_count(levels, topk) == sum(sizes)
    assert tree._candidates(levels, topk) == sum(sizes)
    # The count of `level` levels is the number of candidates before that level.
    assert [candidate_count(level, topk) for level in range(levels)] == [
        sum(sizes[:level]) for level in range(levels)
    ]
    assert tree._candidates(0, topk) == 0


def test_candidate_count_of_examples() -> None:
    assert candidate_count(0, 4) == 0
    assert candidate_count(1, 4) == 4
    assert candidate_count(3, 4) == 4 + 16 + 16
    assert candidate_count(7, 1) == 7
    assert OFF.candidates == 0
    assert DraftPlan(3, 4, 36).candidates == 36


@pytest.mark.parametrize(("levels", "topk"), SHAPES)
def test_parents_are_numbered_by_candidate_counts(levels: int, topk: int) -> None:
    sizes = grown(levels, topk)
    # For each level but the last, the expanded candidates: the last `topk` in reverse order.
    followed = [torch.arange(size).flip(0)[None, :topk] for size in sizes[:-1]]
    wanted = [-1] * topk
    for level, places in enumerate(followed):
        for place in places[0].tolist():
            wanted += [sum(sizes[:level]) + place] * topk
    found = _parents(followed, 1, topk, torch.device("cpu"))
    assert found[0].tolist() == wanted
    assert len(wanted) == candidate_count(levels, topk)
