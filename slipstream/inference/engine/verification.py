"""The rows of one decode step: to each request its last known token, and the drafts after it.

Chains of one length form a matrix, as a plain step does. Anything else, trees and drafts of several
lengths, goes row by row where compiled kernels attend; elsewhere chains are filled up to a matrix.
A node of a tree lies in the slot that it comes in, and stands at the position of its depth; what is
accepted is moved to the slots of its positions afterwards. Used by `engine`.

Shapes: N requests, W rows of each, M rows in all, P the longest path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from slipstream.inference.engine.batch_sampling import BatchSampling
from slipstream.inference.speculation.protocol import DraftTree
from slipstream.kernels.tree_paths import place_nodes, trace_paths
from slipstream.models.draft.forward import Ints
from slipstream.models.numerics import round_up
from slipstream.sampling.choose import SamplingRows


@dataclass(frozen=True, slots=True)
class Verification:
    """`ids_BT` in `slots_BT` of the cache, at `positions_BT`: (N, W), rows of padding included, or
    (1, M), with the rows of the cache that they belong to.

    `starts`: of each request its first row, and then their number. `longest` context with all
    drafts, `shortest` up to the known tokens.
    """

    ids_BT: Tensor
    slots_BT: Tensor
    positions_BT: Tensor
    next_positions: Tensor
    """Where the tokens that the rows choose will stand, one after another; no padding."""
    starts: list[int]
    longest: int
    shortest: int
    rows_M: Tensor | None = None
    paths: Tensor | None = None
    """(B, T, 1 + P), see `kernels.tree_paths`. None: rows attend to all slots up to their own."""

    def sampling(self, batch: BatchSampling) -> SamplingRows:
        """How each row chooses."""
        # Of one request all rows are alike, too.
        if self.rows_M is None or len(batch.names) == 1:
            return batch.repeated(self.ids_BT.shape[1])
        return batch.rows.part(self.rows_M)

    def along(self, hidden_MD: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        """Hidden states (N, W, D) of the nodes on a path through each tree, those of a request
        first."""
        starts = self.starts
        if self.rows_M is None and self.paths is None:
            return hidden_MD[: starts[-1]].view(len(paths), -1, hidden_MD.shape[-1])
        width = max(map(len, paths))
        rows = list[int]()
        for first, path in zip(starts, paths, strict=False):
            rows += [first + node for node in path]
            rows += [first] * (width - len(path))
        found = hidden_MD.index_select(0, torch.from_numpy(np.array(rows)).to(hidden_MD.device))
        return found.view(len(paths), width, -1)


def verification(
    trees: Sequence[DraftTree],
    lengths: Sequence[int],
    device: torch.device,
    *,
    row_by_row: bool,
    multiple: int,
) -> Verification:
    """Of `trees` after contexts of `lengths`, whose last tokens are their roots. `multiple`: what a
    matrix must have of rows, padding included, so that its tokens come in fours.
    """
    counts = list(map(len, trees))
    chains = all(tree.is_chain for tree in trees)
    if row_by_row and not (chains and len(set(counts)) == 1):
        return _row_by_row(trees, lengths, device)
    width, count = max(counts), len(trees)
    padding = round_up(count, multiple) - count
    ids = [[*tree.tokens] + [0] * (width - len(tree)) for tree in trees]
    lengths = [*lengths, *[1] * padding]
    # By numpy: what is as small takes torch several times as long, in every step.
    slots = np.array(lengths)[:, None] + np.arange(-1, width - 1)
    positions, paths = slots, None
    if not chains:
        trees = [_filled_up(tree, width) for tree in trees]
        trees += [DraftTree.chain(0, [0] * (width - 1))] * padding
        placed = _Placed.of(trees, lengths)
        positions = placed.positions_M.reshape(-1, width)
        paths = placed.paths_MP.reshape(len(trees), width, -1)
    ids_BT, slots_BT, positions_BT, following, *more = _put(
        device,
        np.array(ids + [[0] * width] * padding),
        slots,
        positions,
        positions.reshape(-1)[: width * count] + 1,
        *(() if paths is None else (paths,)),
    )
    return Verification(
        ids_BT,
        slots_BT,
        positions_BT,
        following,
        [width * i for i in range(count + 1)],
        max(lengths) + width - 1,
        min(lengths[:count]),
        paths=more[0] if more else None,
    )


def _put(device: torch.device, *arrays: Ints) -> list[Tensor]:
    """To another device in one go: each transfer is waited for."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    together = torch.from_numpy(np.concatenate([array.ravel() for array in arrays])).to(device)
    parts = torch.split(together, [array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def _filled_up(tree: DraftTree, width: int) -> DraftTree:
    """With nodes that nobody looks at."""
    return DraftTree(
        [*tree.tokens] + [0] * (width - len(tree)),
        [*tree.parents, *range(len(tree) - 1, width - 1)],
    )


@dataclass(frozen=True, slots=True)
class _Placed:
    """Where nodes of trees stand, on the CPU."""

    rows_M: Ints
    slots_M: Ints
    positions_M: Ints
    paths_MP: Ints

    @classmethod
    def of(cls, trees: Sequence[DraftTree], lengths: Sequence[int]) -> _Placed:
        parents = np.array([parent for tree in trees for parent in tree.parents])
        counts, known = np.array(list(map(len, trees))), np.array(lengths)
        found = np.empty((3, len(parents)), np.int64)
        given = (*(array.ctypes.data for array in (parents, counts, known)), len(trees))
        start, size = found.ctypes.data, found.strides[0]
        deepest = place_nodes(*given, start, start + size, start + 2 * size)
        paths = np.empty((len(parents), 2 + deepest), np.int64)
        trace_paths(*given, paths.ctypes.data, 2 + deepest)
        return cls(found[0], found[1], found[2], paths)


def _row_by_row(
    trees: Sequence[DraftTree], lengths: Sequence[int], device: torch.device
) -> Verification:
    counts = list(map(len, trees))
    placed = _Placed.of(trees, lengths)
    bent = not all(tree.is_chain for tree in trees)
    ids_1M, slots_1M, positions_1M, following, rows_M, *more = _put(
        device,
        np.array([[token for tree in trees for token in tree.tokens]]),
        placed.slots_M[None],
        placed.positions_M[None],
        placed.positions_M + 1,
        placed.rows_M,
        *((placed.paths_MP[None],) if bent else ()),
    )
    return Verification(
        ids_1M,
        slots_1M,
        positions_1M,
        following,
        [0, *accumulate(counts)],
        max(length + count - 1 for length, count in zip(lengths, counts, strict=True)),
        min(lengths),
        rows_M,
        more[0] if more else None,
    )
