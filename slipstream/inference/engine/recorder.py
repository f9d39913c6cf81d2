"""A computation as one call: CUDA graphs, and the memory that they take.

Used by `graphs`, and by `speculation.draft_graphs` for drafts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakSet

import torch
from torch import Tensor

_log = logging.getLogger(__name__)

_QUIET = 100
"""Steps without a new recording after which it is said what there is."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A computation that has become one call."""

    results: tuple[Tensor, ...]
    """Where they will be."""
    replay: Callable[[], object]
    """Computes them anew, from the same addresses."""
    nbytes: int
    """Memory of the device that is held for it, beyond what was held before."""


class Recorder(Protocol):
    """Turns computations into calls."""

    def __call__(self, compute: Callable[[], tuple[Tensor, ...]]) -> Recorded:
        """Of what `compute` does, which may be done several times for it."""
        ...


class CudaRecorder:
    """By CUDA graphs, which share their memory: one of them runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()

    def __call__(self, compute: Callable[[], tuple[Tensor, ...]]) -> Recorded:
        """See `Recorder`."""
        # Libraries set themselves up in their first calls, which may not be recorded.
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(2):
                compute()
        torch.cuda.current_stream().wait_stream(aside)
        before = _free_bytes()
        if not self._graphs:
            # With its last graph a pool is gone for good.
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        self._graphs.add(graph)
        with torch.cuda.graph(graph, pool=self._pool):
            results = compute()
        return Recorded(results, graph.replay, max(0, before - _free_bytes()))


def _free_bytes() -> int:
    """What the driver has left: graphs take some of that, too, which the allocator does not know
    of."""
    torch.cuda.synchronize()
    # Recording gives back what the allocator has left over, which is not the recording's.
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


class Inputs:
    """Where a recorded computation finds what it is given: values in the first rows, columns, ...
    of buffers, and zeros beyond."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], values: Sequence[Tensor]) -> None:
        """Buffers of `shapes` for such `values`, which are put there."""
        pairs = zip(shapes, values, strict=True)
        self.buffers = tuple(value.new_empty(shape) for shape, value in pairs)
        self._last: Sequence[Tensor | None] = [None] * len(values)
        self.fill(values)

    def fill(self, values: Sequence[Tensor]) -> None:
        """Replace what is there. Nobody may write to `values` afterwards: the same tensor is not
        copied twice in a row."""
        for buffer, value, last in zip(self.buffers, values, self._last, strict=True):
            if value is last:
                continue
            if buffer.shape == value.shape:
                buffer.copy_(value)
                continue
            buffer.zero_()
            buffer[tuple(map(slice, value.shape))] = value
        self._last = values


class RecordedMemory:
    """What recordings take, by the number of rows that they verify of a request; and saying so, in
    one sentence, once there have been no new ones for a while."""

    def __init__(self, what: str) -> None:
        """`what` names a recording: "decode graph"."""
        self._what = what
        self._held: dict[int, list[int]] = {}
        self._quiet = 0
        # Recordings by rows, when it was said last.
        self._said: dict[int, int] = {}

    @property
    def nbytes(self) -> int:
        """All of it."""
        return sum(sum(held) for held in self._held.values())

    def add(self, size: int, nbytes: int) -> None:
        """Another recording, of `size` rows of a request."""
        self._held.setdefault(size, []).append(nbytes)
        self._quiet = 0

    def stepped(self) -> None:
        """A step without a new recording."""
        self._quiet += 1
        if self._quiet == _QUIET:
            self._say()

    def clear(self) -> None:
        """The recordings are gone."""
        self._say()
        self._held.clear()

    def sentence(self) -> str:
        """How many recordings there are, and what they take."""
        parts = [
            f"{_mebibytes(sum(held))} for {size} {'row' if size == 1 else 'rows'} of a request "
            f"({len(held)})"
            for size, held in sorted(self._held.items())
        ]
        count = sum(map(len, self._held.values()))
        take = f"{self._what} takes" if count == 1 else f"{self._what}s take"
        listed = f": {', '.join(parts)}" if parts else ""
        return f"{count} {take} {_mebibytes(self.nbytes)}{listed}"

    def _say(self) -> None:
        held = {size: len(each) for size, each in self._held.items()}
        # Rollouts record the same again and again.
        if held and held != self._said:
            _log.info("%s", self.sentence())
            self._said = held


def _mebibytes(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"
