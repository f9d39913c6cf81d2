"""The input tensors of one decode step: for each request its last known token and its drafts.

One token is a row. If all requests have chains of equal length, as in a step without drafts, the
rows form a matrix (N, W). Otherwise, the compiled attention kernels process the rows of all
requests as one sequence (1, M), without padding. Without these kernels, chains and trees are padded
to a matrix.

The nodes of a draft tree are stored in consecutive slots, in the order of the nodes. The position
of a node is given by its depth. The engine moves keys and values of accepted nodes to the slots of
their positions afterwards. Used by `engine`.

Shapes: N requests, W rows per request, M rows in all, P longest path of a draft tree, D width of
hidden states; (B, T) is (N, W) with padding requests, or (1, M).
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
    """The inputs of a decode step."""

    ids_BT: Tensor
    slots_BT: Tensor
    """The slot of each token in the KV store."""
    positions_BT: Tensor
    next_positions: Tensor
    """The positions of the tokens that are sampled from the rows, (M,), without padding requests.
    """
    starts: list[int]
    """Index of the first row of each request, then the number of rows."""
    longest: int
    """Length of the longest context including its drafts."""
    shortest: int
    """Length of the shortest context without drafts."""
    rows_M: Tensor | None = None
    """For (1, M): the KV store row of each token. None for (N, W)."""
    paths: Tensor | None = None
    """(B, T, 1 + P), as `kernels.tree_paths` defines them. None if rows attend to all slots up to
    their own."""

    def sampling(self, batch: BatchSampling) -> SamplingRows:
        """The sampling settings of each row."""
        # All rows of one request have equal settings, so one request needs no lookup.
        if self.rows_M is None or len(batch.names) == 1:
            return batch.repeated(self.ids_BT.shape[1])
        return batch.rows.part(self.rows_M)

    def states_on_paths(self, hidden_MD: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        """Hidden states (N, W, D) of the nodes on a path through each request's tree.

        Each row begins with the states of its path; padding follows.
        """
        starts = self.starts
        if self.rows_M is None and self.paths is None:
            return hidden_MD[: starts[-1]].view(len(paths), -1, hidden_MD.shape[-1])
        width = max(map(len, paths))
        rows = list[int]()
        for first, path in zip(starts, paths, strict=False):
            rows += [first + node for node in path]
            rows += [first] * (width - len(path))
        states = hidden_MD.index_select(0, torch.from_numpy(np.array(rows)).to(hidden_MD.device))
        return states.view(len(paths), width, -1)


def make_verification(
    trees: Sequence[DraftTree],
    lengths: Sequence[int],
    device: torch.device,
    *,
    row_by_row: bool,
    multiple: int,
) -> Verification:
    """Make the inputs of a decode step that verifies `trees`.

    `lengths` are the lengths of the contexts, whose last tokens are the roots of the trees. With
    `row_by_row`, rows of different requests need not form a matrix. The number of requests of a
    matrix is padded to a multiple of `multiple`.
    """
    counts = list(map(len, trees))
    chains = all(tree.is_chain for tree in trees)
    if row_by_row and not (chains and len(set(counts)) == 1):
        return _row_by_row(trees, lengths, device)
    width, count = max(counts), len(trees)
    padding = round_up(count, multiple) - count
    ids = [[*tree.tokens] + [0] * (width - len(tree)) for tree in trees]
    lengths = [*lengths, *[1] * padding]
    # numpy, because torch takes several times as long for such small arrays.
    slots = np.array(lengths)[:, None] + np.arange(-1, width - 1)
    positions, paths = slots, None
    if not chains:
        trees = [_padded(tree, width) for tree in trees]
        trees += [DraftTree.chain(0, [0] * (width - 1))] * padding
        places = _NodePlaces.of(trees, lengths)
        positions = places.positions_M.reshape(-1, width)
        paths = places.paths_MP.reshape(len(trees), width, -1)
    ids_BT, slots_BT, positions_BT, next_positions, *optional = _to_device(
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
        next_positions,
        [width * i for i in range(count + 1)],
        max(lengths) + width - 1,
        min(lengths[:count]),
        paths=optional[0] if optional else None,
    )


def _to_device(device: torch.device, *arrays: Ints) -> list[Tensor]:
    """Copy arrays to a device in one transfer, because each transfer synchronizes."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    joined = torch.from_numpy(np.concatenate([array.ravel() for array in arrays])).to(device)
    parts = torch.split(joined, [array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def _padded(tree: DraftTree, width: int) -> DraftTree:
    """Append a chain of padding nodes, whose results are not used, up to `width` nodes."""
    return DraftTree(
        [*tree.tokens] + [0] * (width - len(tree)),
        [*tree.parents, *range(len(tree) - 1, width - 1)],
    )


@dataclass(frozen=True, slots=True)
class _NodePlaces:
    """KV store row, slot, position and path of the nodes of all trees, on the CPU."""

    rows_M: Ints
    slots_M: Ints
    positions_M: Ints
    paths_MP: Ints

    @classmethod
    def of(cls, trees: Sequence[DraftTree], lengths: Sequence[int]) -> _NodePlaces:
        """The places of the nodes of `trees`, whose roots are the last tokens of contexts of
        `lengths`."""
        parents = np.array([parent for tree in trees for parent in tree.parents])
        counts, known = np.array(list(map(len, trees))), np.array(lengths)
        places = np.empty((3, len(parents)), np.int64)
        inputs = (*(array.ctypes.data for array in (parents, counts, known)), len(trees))
        start, size = places.ctypes.data, places.strides[0]
        deepest = place_nodes(*inputs, start, start + size, start + 2 * size)
        paths = np.empty((len(parents), 2 + deepest), np.int64)
        trace_paths(*inputs, paths.ctypes.data, 2 + deepest)
        return cls(places[0], places[1], places[2], paths)


def _row_by_row(
    trees: Sequence[DraftTree], lengths: Sequence[int], device: torch.device
) -> Verification:
    """The inputs of a decode step as one sequence (1, M) without padding."""
    counts = list(map(len, trees))
    places = _NodePlaces.of(trees, lengths)
    any_tree = not all(tree.is_chain for tree in trees)
    ids_1M, slots_1M, positions_1M, next_positions, rows_M, *optional = _to_device(
        device,
        np.array([[token for tree in trees for token in tree.tokens]]),
        places.slots_M[None],
        places.positions_M[None],
        places.positions_M + 1,
        places.rows_M,
        *((places.paths_MP[None],) if any_tree else ()),
    )
    return Verification(
        ids_1M,
        slots_1M,
        positions_1M,
        next_positions,
        [0, *accumulate(counts)],
        max(length + count - 1 for length, count in zip(lengths, counts, strict=True)),
        min(lengths),
        rows_M,
        optional[0] if optional else None,
    )
