"""Resident memory (RSS) of this process: its size, its peak, and the return of freed memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from slipstream.heap import freed_memory_is_kept

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


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """Files of a control group, and the name of its inactive file pages in `stat`."""

    limit: Path
    usage: Path
    stat: Path
    inactive: str


def memory_groups(listing: Path, root: Path) -> Iterator[MemoryGroup]:
    """Yield the control groups that limit the memory of this process, and all their parents.

    `listing` is the process's `/proc/self/cgroup`, `root` the mount point of the control groups
    (version 1 or 2). In a container, the listing may name groups that are not visible inside it.
    """
    if not listing.exists():
        return
    for line in listing.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            top = root / "memory"
        else:
            continue
        limit, usage, inactive = names
        folder = top / path.lstrip("/")
        for group in (folder, *folder.parents):
            if group.is_relative_to(top):
                yield MemoryGroup(group / limit, group / usage, group / "memory.stat", inactive)


def usable_bytes(
    listing: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> int:
    """Return the main memory in bytes that this process can use: the machine's, limited by its
    control groups (`memory_groups`)."""
    limits = [int(psutil.virtual_memory().total)]
    for group in memory_groups(listing, root):
        with contextlib.suppress(OSError, ValueError):  # not visible, or no limit ("max")
            limits.append(int(group.limit.read_text()))
    return min(limits)


def return_freed_memory() -> None:
    """Delete unreachable objects, and return all freed memory to the system."""
    gc.collect()
    FreedMemory(limit_bytes=0).give_back()


class FreedMemory:
    """Returns freed memory to the system, which the C library (glibc) would keep.

    The C library keeps freed memory for the next allocation (`heap.keep_freed_memory`). This saves
    page faults. But blocks of many sizes leave gaps between them, so the process would grow from
    step to step. Freed memory is kept on two conditions: the process uses at most `SHARE` of the
    usable memory, and since the last return it has grown by at most `GROWTH` times what a step
    needs. What a step needs is measured: the growth in the first step after a return, but not more
    than the next return frees, because a part of the growth may stay in use.
    """

    EVERY_SECONDS = 0.5
    """The minimum time between two returns. With gigabytes, one takes half a second."""

    SHARE, GROWTH = 0.6, 1.15
    """The limits of the two conditions."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        resident: Callable[[], int] = resident_bytes,
        *,
        limit_bytes: float | None = None,
    ) -> None:
        """`limit_bytes` is the resident memory of the first condition; None: `SHARE` of the usable
        memory, or 0 if this process does not keep freed memory."""
        self._clock, self._resident = clock, resident
        if limit_bytes is None:
            limit_bytes = self.SHARE * usable_bytes() if freed_memory_is_kept() else 0
        self._limit = limit_bytes
        # Only glibc has this function.
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        # Time and resident bytes of the last return, and whether no step has ended since.
        self._last, self._returned_at, self._is_first = -math.inf, 0, False
        # Bytes that a step needs: the largest value that was measured.
        self._needed = 0

    def give_back(self) -> bool:
        """Return freed memory to the system, unless the process may keep it, or it was done less
        than `EVERY_SECONDS` ago. Call it after each step. Returns whether it was done now."""
        if self._trim is None or self._clock() - self._last < self.EVERY_SECONDS:
            return False
        grown = self._resident() - self._returned_at
        if self._is_first:
            self._needed, self._is_first = max(self._needed, grown), False
        if self._returned_at + grown <= self._limit and grown <= self.GROWTH * self._needed:
            return False
        self._trim(0)
        before = self._returned_at + grown
        self._last, self._returned_at, self._is_first = self._clock(), self._resident(), True
        self._needed = min(self._needed, max(0, before - self._returned_at))
        return True
