"""What PyTorch allocates while something is computed. Called by `loops.footprint`."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerActivity, profile


@cache
def _first_trace() -> None:
    # Or each trace tells standard error that it begins and ends.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True):
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocated:
    """Bytes: the most that there were at one time, and those that were still there at the end."""

    peak: int
    kept: int


class AllocationTrace:
    """Bytes allocated between `start` and `stop`, less what is freed; what there was before is not
    among them. On a CPU both are called on the thread that computes, and each operation is
    traced: it is for work of seconds."""

    def __init__(self, device: torch.device) -> None:
        """On the main thread: a CPU's first trace has to begin there, or PyTorch complains."""
        self._device = device
        self._before = 0
        self._trace: profile | None = None
        if device.type != "cuda":
            _first_trace()

    def start(self) -> None:
        """Begin to count."""
        if self._device.type == "cuda":
            self._before = torch.cuda.memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        self._trace = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._trace.start()

    def stop(self) -> Allocated:
        """What was counted."""
        if self._trace is None:
            return Allocated(
                peak=torch.cuda.max_memory_allocated(self._device) - self._before,
                kept=torch.cuda.memory_allocated(self._device) - self._before,
            )
        self._trace.stop()
        with TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            self._trace.export_chrome_trace(str(file))
            events = json.loads(file.read_text(errors="replace"))["traceEvents"]
        # An event for each allocation, of fewer than 0 bytes where one is freed.
        changes = [(e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]"]
        held = peak = 0
        for _, change in sorted(changes, key=lambda each: each[0]):
            held += change
            peak = max(peak, held)
        return Allocated(peak=peak, kept=held)
