"""Decode steps that are recorded once for each shape and replayed after that: CUDA graphs.

A step is hundreds of small operations, and to start them takes the CPU longer than a GPU needs to
compute them in all but the largest models. A recording starts them all at once. It is fixed to
shapes and addresses, so a step is computed with rows and keys rounded up to a few sizes (those
beyond are padding that nothing looks at), and recordings end with the memory or the weights that
they were made for. Shapes as in `runner`; used by it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from slipstream.inference.engine.kv_cache import DecodeView, KVStore
from slipstream.models.attention import padded_keys
from slipstream.models.decoder import PackedDecoder
from slipstream.models.numerics import round_up

ROWS = 8
"""From here on rows are rounded up to multiples of it; below, to powers of two."""

_SEEN = 2
"""Times that a shape has come up before it is recorded: recording takes as long as many steps."""


class Recorder(Protocol):
    """Turns a computation into one call."""

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
        """Where the result will be, and what computes it anew from the same addresses."""
        ...


class CudaRecorder:
    """By CUDA graphs, which share their memory: one of them runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
        """See `Recorder`."""
        # Libraries set themselves up in their first calls, which may not be recorded.
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(2):
                compute()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = compute()
        return result, graph.replay


@dataclass(frozen=True, slots=True)
class _Step:
    """A recorded step: tokens and their slots (N, W) go in, hidden states (N * W, D) come out."""

    ids_NW: Tensor
    slots_NW: Tensor
    hidden: Tensor
    replay: Callable[[], object]


class DecodeGraphs:
    """The recordings for one policy and one store."""

    def __init__(self, record: Recorder, taps: tuple[int, ...] = ()) -> None:
        """Hidden states come with the inputs of the layers `taps` beside them."""
        self._record, self._taps = record, taps
        self._data: Tensor | None = None
        self._steps: dict[tuple[int, int, int], _Step] = {}
        self._seen: dict[tuple[int, int, int], int] = {}
        self.replayed = 0

    def clear(self) -> None:
        """Let go of all recordings, and of the memory that they hold: other weights come, or the
        store gives its memory back."""
        self._data = None
        self._steps.clear()
        self._seen.clear()

    def decode(
        self,
        packed: PackedDecoder,
        store: KVStore,
        ids_NW: Tensor,
        slots_NW: Tensor,
        longest: int,
    ) -> Tensor | None:
        """`Runner.decode` by a recording, its hidden states side by side; None where there is none
        yet. The store has rows in multiples of `ROWS`."""
        if self._data is not store.data:
            self.clear()
            self._data = store.data
        N, W = ids_NW.shape
        rows = bucket_of_rows(N)
        keys = min(bucket_of_keys(longest, packed.dtype, ids_NW.device), store.slots)
        shape = rows, W, keys
        step = self._steps.get(shape)
        if step is None:
            self._seen[shape] = self._seen.get(shape, 0) + 1
            if self._seen[shape] <= _SEEN:
                return None
            # To record is to compute, and to write keys and values: with this step's tokens.
            ids, slots = (_fill(x.new_empty(rows, W), x) for x in (ids_NW, slots_NW))
            step = self._steps[shape] = self._recorded(packed, store, ids, slots, keys)
        _fill(step.ids_NW, ids_NW)
        _fill(step.slots_NW, slots_NW)
        step.replay()
        self.replayed += 1
        # Drafters keep what the next replay writes over.
        return step.hidden[: N * W].clone()

    def _recorded(
        self, packed: PackedDecoder, store: KVStore, ids_NW: Tensor, slots_NW: Tensor, keys: int
    ) -> _Step:
        last = packed.config.max_position_embeddings - 1

        def compute() -> Tensor:
            view = DecodeView(store, slots_NW, keys, 0)
            positions_NW = slots_NW.clamp(max=last)
            found = packed.forward(ids_NW, positions_NW, kv_cache=view, taps=self._taps)
            return found.side_by_side().flatten(0, 1)

        return _Step(ids_NW, slots_NW, *self._record(compute))


def _fill(buffer: Tensor, values: Tensor) -> Tensor:
    """`values` into the first rows of a buffer. The others are padding, in rows of the store that
    nobody holds: zeros."""
    buffer[: len(values)] = values
    buffer[len(values) :] = 0
    return buffer


def bucket_of_rows(count: int) -> int:
    """1, 2, 4, 8, 16, 24, ..."""
    return 1 << (count - 1).bit_length() if count < ROWS else round_up(count, ROWS)


def bucket_of_keys(length: int, dtype: torch.dtype, device: torch.device) -> int:
    """What attention to `length` positions takes, rounded up to two sizes in each doubling."""
    step = padded_keys(1, dtype, device)
    count = padded_keys(length, dtype, device) // step
    size = 1
    while size < count:
        size = size * 3 // 2 if size % 2 == 0 and size * 3 // 2 >= count else size * 2
    return size * step
