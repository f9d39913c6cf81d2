"""Sets up the memory of a process: the C library's heap, and Python's garbage collector.

By default, glibc returns large blocks to the system when they are freed. The next block of that
size then costs a page fault for every 4 KB. A training step allocates the same gigabytes again and
again, and page faults took up to half of its time (figures: `docs/log/training_step.md`).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import os
from collections.abc import Iterator

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
"""Names of settings of glibc's `mallopt`."""

_NEVER = -1
_LARGEST = (128 << 20, 32 << 20)
"""Blocks from this size on still come from the system. There are few of them, but each would leave
a large gap in the heap: with a vocabulary of 151,936 tokens, a process needed 1.6 times the
allocated bytes. Older versions of glibc accept only the second size."""

_GROWTH = 64 << 20

_OWN_SETTINGS = ("MALLOC_", "GLIBC_TUNABLES")
"""Beginnings of environment variables with which users set up the heap themselves."""


@functools.cache
def keep_freed_memory() -> bool:
    """Let all threads allocate from one heap, which keeps what is freed.

    Threads that exist already may keep heaps of their own. `metrics.resident.FreedMemory` returns
    freed memory when there is too much. Returns False, and does nothing, without glibc, and if the
    environment has settings of glibc's heap.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None or any(name.startswith(_OWN_SETTINGS) for name in os.environ):
        return False
    if not any(set_option(_MMAP_THRESHOLD, size) for size in _LARGEST):
        return False
    # A second heap (arena) is limited to 64 MB, so larger blocks would still come from the system.
    set_option(_ARENA_MAX, 1)
    set_option(_TRIM_THRESHOLD, _NEVER)
    set_option(_TOP_PAD, _GROWTH)
    return True


def freed_memory_is_kept() -> bool:
    """Return whether `keep_freed_memory` was called in this process and had an effect."""
    return keep_freed_memory.cache_info().currsize > 0 and keep_freed_memory()


@contextlib.contextmanager
def without_garbage_collector() -> Iterator[None]:
    """Stop Python's cyclic garbage collector in the body, which imports modules.

    Imports create a million objects that stay. The collector would examine all of them again and
    again and find nothing to free, which takes time for nothing.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@functools.cache
def skip_collection_at_exit() -> None:
    """Let this process end without a last run of the garbage collector.

    Python examines all objects twice before it ends, which takes half a second once torch and
    transformers are imported. The system takes the memory back anyway.
    """
    atexit.register(gc.freeze)
