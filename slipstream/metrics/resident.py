"""Resident memory (RSS) of this process. Called by benchmarks and by `preflight.dry_run`."""

from __future__ import annotations

import resource
import sys
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
