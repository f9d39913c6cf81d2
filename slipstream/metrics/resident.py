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

from slipstream.heap import freed_memory_is_kept, heap_in_use

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


def anonymous_bytes() -> int:
    """Return the current resident memory of this process without mapped files, in bytes."""
    info = psutil.Process().memory_info()
    return int(info.rss - getattr(info, "shared", 0))  # Only Linux counts it.


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


HEAP_FACTOR = 1.35
"""Memory that temporary blocks may take in the heap, divided by their bytes at the peak.

Freed memory leaves gaps, because blocks have many sizes. `--dry-run` uses the same factor. Measured
with glibc (`python -m bench.memory`).
"""

_EVERY_SECONDS = 0.5
"""The minimum time between two calls that take a few milliseconds."""


class HeapPeak:
    """How much memory the heap of this process needs: the highest use that was seen, and memory
    that cannot be returned."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        in_use: Callable[[], int | None] = heap_in_use,
        anonymous: Callable[[], int] = anonymous_bytes,
    ) -> None:
        self._clock, self._in_use, self._anonymous = clock, in_use, anonymous
        self._last, self._highest, self._rest = -math.inf, 0, 0

    def note(self) -> None:
        """Measure the use now, at most every `_EVERY_SECONDS`. Call it when most is in use."""
        now = self._clock()
        if now - self._last >= _EVERY_SECONDS and (used := self._in_use()) is not None:
            self._last, self._highest = now, max(self._highest, used)

    def freed_memory_was_returned(self) -> None:
        """Measure the memory besides what is in use: what other allocators hold, and gaps."""
        if (used := self._in_use()) is not None:
            self._rest = max(0, self._anonymous() - used)

    def forget(self) -> None:
        """Forget what was seen, because the process will now do other work."""
        self._last, self._highest = -math.inf, 0

    def exceeded(self) -> bool:
        """Return whether the process has more memory than it needs: what is in use or cannot be
        returned, and `HEAP_FACTOR` times what a step needs in addition.

        Returns False without counts of the C library.
        """
        used = self._in_use()
        if used is None:
            return False
        needed = used + self._rest + HEAP_FACTOR * max(self._highest - used, 0)
        return self._anonymous() > needed


HEAP_PEAK = HeapPeak()
"""The peak of this process. All its parts use one heap."""


def return_freed_memory() -> None:
    """Delete unreachable objects, return all freed memory to the system, and forget the peak."""
    gc.collect()
    HEAP_PEAK.forget()
    FreedMemory(limit_bytes=0).give_back()


class FreedMemory:
    """Returns freed memory that the C library (glibc) keeps to the system.

    The C library keeps freed memory for the next allocation (`heap.keep_freed_memory`), which saves
    page faults. Blocks of many sizes leave gaps between them, so the heap would grow from step to
    step. Freed memory is kept while the process has no more than it needs (`HeapPeak`), and uses at
    most `SHARE` of the usable memory.
    """

    EVERY_SECONDS = _EVERY_SECONDS

    SHARE = 0.6
    """Freed memory is kept while the process uses at most this share of the usable memory."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        limit_bytes: float | None = None,
        peak: HeapPeak = HEAP_PEAK,
    ) -> None:
        """`limit_bytes` is the resident memory from which on freed memory is returned, whatever the
        heap needs; None: `SHARE` of the usable memory, or 0 if this process does not keep freed
        memory."""
        self._clock, self._last, self._peak = clock, -math.inf, peak
        if limit_bytes is None:
            limit_bytes = self.SHARE * usable_bytes() if freed_memory_is_kept() else 0
        self._limit = limit_bytes
        # Only glibc has this function.
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def give_back(self) -> bool:
        """Return freed memory to the system, unless the process may keep it, or it was done less
        than `EVERY_SECONDS` ago. Returns whether it was done now."""
        now = self._clock()
        if self._trim is None or now - self._last < self.EVERY_SECONDS:
            return False
        if resident_bytes() <= self._limit and not self._peak.exceeded():
            return False
        self._last = now
        self._trim(0)
        self._peak.freed_memory_was_returned()
        return True
