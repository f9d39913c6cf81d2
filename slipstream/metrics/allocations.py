"""What PyTorch has allocated at moments of a computation. Called by `preflight.trainer_memory`."""

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
    # Or each trace tells standard error that it begins and ends.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True):
        pass


class AllocationTrace:
    """Bytes allocated since `start`, less those freed, at moments that `mark` names, and the most
    since the moment before. What there was before is not among them. On a CPU all is called on the
    thread that computes, and each operation is traced: it is for work of seconds."""

    def __init__(self, device: torch.device) -> None:
        """On the main thread: a CPU's first trace has to begin there, or PyTorch complains."""
        self._device = device
        self._before = 0
        self._trace: profile | None = None
        self._held: dict[str, int] = {}
        self._most: dict[str, int] = {}
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

    def mark(self, moment: str) -> None:
        """This moment is called so; of several the last one."""
        if self._trace is not None:
            with record_function(_MARK + moment):
                return
        self._held[moment] = torch.cuda.memory_allocated(self._device) - self._before
        self._most[moment] = torch.cuda.max_memory_allocated(self._device) - self._before
        torch.cuda.reset_peak_memory_stats(self._device)

    def stop(self) -> tuple[dict[str, int], dict[str, int]]:
        """By moment: what was held then, and the most since the one before."""
        if self._trace is None:
            return self._held, self._most
        self._trace.stop()
        with TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            self._trace.export_chrome_trace(str(file))
            events = json.loads(file.read_text(errors="replace"))["traceEvents"]
        # An event for each allocation, of fewer than 0 bytes where one is freed.
        told = [e for e in events if e.get("name") == "[memory]" or _is_mark(e)]
        held = most = 0
        for event in sorted(told, key=lambda each: each["ts"]):
            if _is_mark(event):
                moment = event["name"].removeprefix(_MARK)
                self._held[moment], self._most[moment] = held, most
                most = held
            else:
                held += event["args"]["Bytes"]
                most = max(most, held)
        return self._held, self._most


def _is_mark(event: dict[str, object]) -> bool:
    return str(event.get("name")).startswith(_MARK) and event.get("ph") == "X"
