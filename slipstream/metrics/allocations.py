"""Traces how much memory PyTorch has allocated at marked points of a computation.

Called by `preflight.trainer_memory`.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerActivity, profile, record_function

_MARK = "slipstream: "


@cache
def _first_trace() -> None:
    # Without this, each trace writes to standard error when it starts and ends.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True):
        pass


class AllocationTrace:
    """Measures net bytes allocated since `start`, and their peaks, at named points (`mark`).

    Memory allocated before `start` is not counted. On a CPU, all methods must be called in the
    thread that computes. Every operation is traced there, so keep the computation short (seconds).
    """

    def __init__(self, device: torch.device) -> None:
        """Create on the main thread: PyTorch warns if the first CPU trace starts elsewhere."""
        self._device = device
        self._before = 0
        self._trace: profile | None = None
        self._held: dict[str, int] = {}
        self._peak: dict[str, int] = {}
        if device.type != "cuda":
            _first_trace()

    def start(self) -> None:
        """Start counting."""
        if self._device.type == "cuda":
            self._before = torch.cuda.memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        self._trace = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._trace.start()

    def mark(self, moment: str) -> None:
        """Name the current point of the computation; a repeated name overwrites the earlier one."""
        if self._trace is not None:
            with record_function(_MARK + moment):
                return
        self._held[moment] = torch.cuda.memory_allocated(self._device) - self._before
        self._peak[moment] = torch.cuda.max_memory_allocated(self._device) - self._before
        torch.cuda.reset_peak_memory_stats(self._device)

    def stop(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return bytes held at each point, and the peak since the previous point."""
        if self._trace is None:
            return self._held, self._peak
        self._trace.stop()
        with TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            self._trace.export_chrome_trace(str(file))
            events = json.loads(file.read_text(errors="replace"))["traceEvents"]
        # There is one event per allocation; a freed one has negative bytes.
        relevant = [e for e in events if e.get("name") == "[memory]" or _is_mark(e)]
        held = peak = 0
        for event in sorted(relevant, key=lambda each: each["ts"]):
            if _is_mark(event):
                moment = event["name"].removeprefix(_MARK)
                self._held[moment], self._peak[moment] = held, peak
                peak = held
            else:
                held += event["args"]["Bytes"]
                peak = max(peak, held)
        return self._held, self._peak


def _is_mark(event: dict[str, object]) -> bool:
    return str(event.get("name")).startswith(_MARK) and event.get("ph") == "X"
