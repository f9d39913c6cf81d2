"""Sharing a kernel out among the threads that torch's own operations run on.

A kernel's last two arguments are its part and the number of parts: each part does its share, and
shares do not overlap. A second pool of threads would fight with torch's for the cores (figures:
`docs/log/threads.md`), so the OpenMP team that torch has already made is asked. A torch without
libgomp (macOS, Windows) has none that could be asked: there `suited` says no, and what is drawn by
kernels all the same is drawn on the calling thread.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from llvmlite import binding
from numba import types
from numba.core.types.functions import ExternalFunction

from slipstream.kernels.compiling import callback, kernel


@cache
def suited() -> bool:
    """Whether kernels do better here than torch's own operations: there is a team, and this CPU
    multiplies and adds in one instruction (x86 since 2013, every Arm of 64 bits)."""
    if _gomp is None:
        return False
    if platform.machine().lower() in ("arm64", "aarch64"):
        return True
    return bool(binding.get_host_cpu_features().get("fma", False))


SHARED_FROM = 1 << 14
"""Elements of work, each about a nanosecond, that outweigh waking the team."""


def _libgomp() -> ctypes.CDLL | None:
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
        return ctypes.CDLL(str(path))
    return None


_gomp = _libgomp()
if _gomp is not None:
    for _name in ("omp_get_thread_num", "omp_get_num_threads", "GOMP_barrier"):
        _address = ctypes.cast(getattr(_gomp, _name), ctypes.c_void_p).value
        assert _address is not None
        binding.add_symbol(_name, _address)
else:
    # Never called: kernels run on one thread.
    binding.add_symbol("GOMP_barrier", 0)

_count = types.int32()
part_number = ExternalFunction("omp_get_thread_num", _count)
"""In a function that the team runs: which of its threads this is."""

part_count = ExternalFunction("omp_get_num_threads", _count)
"""In a function that the team runs: how many threads it has."""


_barrier = ExternalFunction("GOMP_barrier", types.void())


@kernel
def wait(parts):
    """In a kernel: until all parts have come this far."""
    if parts > 1:
        _barrier()


class Shared:
    """A function over the address of packed arguments, for the team. Compiled at its first call:
    all of them take a minute or two, and a run needs but some, on a GPU hardly any."""

    __slots__ = ("_compiled", "_function", "_lock")

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function
        # It holds the code that the address is of.
        self._compiled: Any = None
        self._lock = Lock()

    @property
    def address(self) -> int:
        """Where its code is."""
        if self._compiled is None:
            with self._lock:
                if self._compiled is None:
                    self._compiled = callback(self._function)
        found: int = self._compiled.address
        return found


def for_team(function: Callable[..., None]) -> Shared:
    """A function that `run` hands to the team."""
    return Shared(function)


@contextmanager
def by_itself(wanted: bool) -> Iterator[None]:
    """Kernels in the body, and torch's operations, run on the calling thread where that is
    `wanted`: the others sleep soon then, and their cores are free."""
    before = torch.get_num_threads()
    if not wanted or before == 1 or _gomp is None:
        yield
        return
    # Of this thread alone. torch's own way also makes the threads of another pool anew, which wait
    # in a loop, and this is done at every step.
    _gomp.omp_set_num_threads(1)
    try:
        yield
    finally:
        _gomp.omp_set_num_threads(before)


def run(whole: Callable[..., None], shared: Shared, arguments: tuple[int, ...], work: int) -> None:
    """Run a kernel over `arguments`: `shared` by the team when `work`, in elements, is worth it,
    else by the calling thread alone; `whole` where there is no team."""
    if _gomp is None:
        whole(*arguments, 0, 1)
        return
    # Of one thread, too: `whole` would have to be compiled, or loaded, beside it.
    threads = torch.get_num_threads() if work >= SHARED_FROM else 1
    packed = (ctypes.c_int64 * len(arguments))(*arguments)
    _gomp.GOMP_parallel(ctypes.c_void_p(shared.address), packed, threads, 0)
