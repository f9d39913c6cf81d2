"""CUDA graphs: recording a computation, its input buffers, and the memory of recordings.

Used by `graphs` and `choice_graphs`, and by `speculation.draft_graphs` for draft heads.
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

_LOG_AFTER_STEPS = 100
"""The memory of recordings is logged after this many steps without a new recording."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded computation."""

    results: tuple[Tensor, ...]
    """The tensors that each replay writes its results to."""
    replay: Callable[[], object]
    """Runs the computation again, with inputs and results at the same addresses."""
    nbytes: int
    """Bytes of device memory that the recording holds."""


class Recorder(Protocol):
    """Records computations."""

    def __call__(self, compute: Callable[[], tuple[Tensor, ...]]) -> Recorded:
        """Record the operations of `compute`. It may be called several times."""
        ...


class CudaRecorder:
    """A `Recorder` that captures CUDA graphs. The graphs share a memory pool, because only one of
    them runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()

    def __call__(self, compute: Callable[[], tuple[Tensor, ...]]) -> Recorded:
        """Capture `compute` as a CUDA graph, after two warm-up calls on a side stream."""
        # Libraries initialize themselves in their first calls, which must not be captured.
        side_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream):
            for _ in range(2):
                compute()
        torch.cuda.current_stream().wait_stream(side_stream)
        before = _free_bytes()
        if not self._graphs:
            # A pool cannot be used again after its last graph was deleted.
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        self._graphs.add(graph)
        with torch.cuda.graph(graph, pool=self._pool):
            results = compute()
        return Recorded(results, graph.replay, max(0, before - _free_bytes()))


def _free_bytes() -> int:
    """Free device memory in bytes as the driver reports it. Graphs also use memory that torch's
    allocator does not count."""
    torch.cuda.synchronize()
    # Capturing releases the allocator's unused memory, which would hide memory of the graph.
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


class Inputs:
    """The input buffers of a recorded computation, at fixed addresses. Each input fills the first
    rows, columns, ... of its buffer; the rest is zero."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], values: Sequence[Tensor]) -> None:
        """Allocate buffers of `shapes`, with the dtypes and devices of `values`, and fill them."""
        pairs = zip(shapes, values, strict=True)
        self.buffers = tuple(value.new_empty(shape) for shape, value in pairs)
        self._last: Sequence[Tensor | None] = [None] * len(values)
        self.fill(values)

    def fill(self, values: Sequence[Tensor]) -> None:
        """Copy `values` to the buffers. A tensor that was also the last value of its buffer is not
        copied again, so callers must not write to `values` afterwards."""
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
    """The memory of recordings, by size. It is logged in one sentence when there has been no new
    recording for `_LOG_AFTER_STEPS` steps."""

    def __init__(
        self, what: str, unit: tuple[str, str] = ("token per request", "tokens per request")
    ) -> None:
        """`what` names a recording in the log, such as "decode graph". `unit` is the unit of sizes,
        singular and plural."""
        self._what, self._unit = what, unit
        self._sizes: dict[int, list[int]] = {}
        self._steps_since_new = 0
        # Number of recordings, by size, at the time of the last log message.
        self._logged: dict[int, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all recordings."""
        return sum(map(sum, self._sizes.values()))

    def add(self, size: int, nbytes: int) -> None:
        """Count a new recording of a step of this `size`."""
        self._sizes.setdefault(size, []).append(nbytes)
        self._steps_since_new = 0

    def stepped(self) -> None:
        """Count a step without a new recording."""
        self._steps_since_new += 1
        if self._steps_since_new == _LOG_AFTER_STEPS:
            self._log_if_changed()

    def clear(self) -> None:
        """Forget all recordings; the caller has deleted them."""
        self._log_if_changed()
        self._sizes.clear()

    def sentence(self) -> str:
        """The number of recordings and their memory, for the log."""
        parts = [
            f"{_mebibytes(sum(sizes))} for {size} {self._unit[size != 1]} ({len(sizes)})"
            for size, sizes in sorted(self._sizes.items())
        ]
        count = sum(map(len, self._sizes.values()))
        use = f"{self._what} uses" if count == 1 else f"{self._what}s use"
        listed = f": {', '.join(parts)}" if parts else ""
        return f"{count} {use} {_mebibytes(self.nbytes)}{listed}"

    def _log_if_changed(self) -> None:
        counts = {size: len(sizes) for size, sizes in self._sizes.items()}
        # Each rollout makes the same recordings again; they are logged once.
        if counts and counts != self._logged:
            _log.info("%s", self.sentence())
            self._logged = counts


def _mebibytes(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"
