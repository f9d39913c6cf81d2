"""Resident memory (RSS) of this process: its size, its peak, and the return of freed memory."""

from __future__ import annotations

import contextlib
import gc
import math
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from slipstream.heap import freed_memory_is_kept, heap_in_use, return_to_system

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
"""Memory that the temporary blocks of a step take in the heap, divided by their bytes.

It is more than their bytes, because freed memory leaves gaps: blocks have many sizes. Chosen from
measurements in which all freed memory was kept (docs/log/memory.md). `--dry-run` uses it, too.
"""


class HeapNeed:
    """How much memory a process needs: what is in use, and the temporary blocks of a step."""

    def __init__(
        self,
        in_use: Callable[[], int | None] = heap_in_use,
        anonymous: Callable[[], int] = anonymous_bytes,
    ) -> None:
        self._in_use, self._anonymous = in_use, anonymous
        self._temporary = self._not_returnable = 0

    def in_use(self) -> int:
        """Return the allocated bytes of the heap; 0 if the C library does not count them."""
        return self._in_use() or 0

    def note_temporary(self, size: int) -> None:
        """Note that a step has temporary blocks of `size` bytes. The largest size counts."""
        self._temporary = max(self._temporary, size)

    def forget(self) -> None:
        """Forget the sizes, because the process will now do other work."""
        self._temporary = self._not_returnable = 0

    def note_not_returnable(self) -> None:
        """Measure the memory besides what is in use, right after freed memory was returned: gaps
        within pages, and what other allocators hold."""
        if (used := self._in_use()) is not None:
            self._not_returnable = max(0, self._anonymous() - used)

    def has_too_much(self) -> bool:
        """Return whether the process has more memory than it needs.

        It needs what is in use, what cannot be returned, and `HEAP_FACTOR` times the temporary
        blocks. Returns False if the C library does not count what is in use.
        """
        if (used := self._in_use()) is None:
            return False
        needed = used + self._not_returnable + HEAP_FACTOR * self._temporary
        return self._anonymous() > needed


HEAP_NEED = HeapNeed()
"""The need of this process. All its parts use one heap."""


def return_freed_memory() -> None:
    """Delete unreachable objects, return all freed memory, and forget what steps needed."""
    gc.collect()
    HEAP_NEED.forget()
    FreedMemory(limit_bytes=0).give_back()


class FreedMemory:
    """Returns freed memory to the system, which the C library (glibc) would keep.

    The C library keeps freed memory for the next allocation (`heap.keep_freed_memory`). This saves
    page faults. But blocks of many sizes leave gaps between them, so the heap would grow from step
    to step. Freed memory is kept on two conditions: the process has no more than it needs
    (`HeapNeed`), and it uses at most `SHARE` of the usable memory.
    """

    EVERY_SECONDS = 0.5
    """The minimum time between two returns. With gigabytes, one takes half a second."""

    SHARE = 0.6
    """The second condition."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        limit_bytes: float | None = None,
        need: HeapNeed = HEAP_NEED,
    ) -> None:
        """Freed memory is returned, whatever the process needs, if its resident memory exceeds
        `limit_bytes`. None: `SHARE` of the usable memory, or 0 if this process does not keep freed
        memory."""
        self._clock, self._last, self._need = clock, -math.inf, need
        if limit_bytes is None:
            limit_bytes = self.SHARE * usable_bytes() if freed_memory_is_kept() else 0
        self._limit = limit_bytes

    def give_back(self) -> bool:
        """Return freed memory to the system, unless the process may keep it, or it was done less
        than `EVERY_SECONDS` ago. Returns whether it was done now."""
        if self._clock() - self._last < self.EVERY_SECONDS:
            return False
        if resident_bytes() <= self._limit and not self._need.has_too_much():
            return False
        if not return_to_system():
            return False
        self._last = self._clock()
        self._need.note_not_returnable()
        return True
