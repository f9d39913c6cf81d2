"""Resident memory (RSS) of this process: its size, its peak, and the return of freed memory."""

from __future__ import annotations

import ctypes
import math
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def reset_peak_rss() -> None:
    """Reset the peak that `peak_rss` reports. Works on Linux only."""
    if _CLEAR_REFS.exists():
        _CLEAR_REFS.write_text("5")


def peak_rss() -> int:
    """Return the peak resident memory of this process in bytes."""
    if _STATUS.exists():
        return _status("VmHWM")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def resident_bytes() -> int:
    """Return the current resident memory of this process in bytes."""
    return int(psutil.Process().memory_info().rss)


def _status(field: str) -> int:
    line = next(x for x in _STATUS.read_text().splitlines() if x.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


class FreedMemory:
    """Returns freed memory that the C library (glibc) keeps to the system.

    Rollouts and optimizer steps allocate and free blocks of many sizes. Without this, the process
    grows: by a few percent over thousands of rollouts, and to several times the allocated bytes
    over optimizer steps of a model with large activations.
    """

    EVERY_SECONDS = 0.5
    """The minimum time between two calls that do it, because one takes a few milliseconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._last = clock, -math.inf
        # Only glibc has this function.
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def give_back(self) -> bool:
        """Return freed memory to the system, unless that was done less than `EVERY_SECONDS` ago.
        Returns whether it was done now."""
        now = self._clock()
        if self._trim is None or now - self._last < self.EVERY_SECONDS:
            return False
        self._last = now
        self._trim(0)
        return True
