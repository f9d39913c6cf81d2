"""Run a kernel on the OpenMP threads of torch.

A kernel's last two arguments are its part and the number of parts. Each part does its share of the
work, and shares do not overlap. A second thread pool would compete with torch's for the cores
(figures: `docs/log/threads.md`), so kernels run on torch's own OpenMP team. A torch without libgomp
(macOS, Windows) has no such team. There `kernels_supported` returns False, and the kernels that are
used anyway (token drawing) run on the calling thread.
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
def kernels_supported() -> bool:
    """Return whether the kernels are faster here than torch's own operations.

    They need torch's OpenMP team, and fused multiply-add (x86 CPUs since 2013, all 64-bit Arm).
    """
    if _gomp is None:
        return False
    if platform.machine().lower() in ("arm64", "aarch64"):
        return True
    return bool(binding.get_host_cpu_features().get("fma", False))


SHARED_FROM = 1 << 14
"""The number of work elements, of about one nanosecond each, from which a kernel runs on the team.
Less work is done faster by the calling thread alone."""


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
    # Compiled code refers to the symbol but never calls it, because kernels run on one thread.
    binding.add_symbol("GOMP_barrier", 0)

_count = types.int32()
part_number = ExternalFunction("omp_get_thread_num", _count)
"""In a function that the team runs: the number of this thread."""

part_count = ExternalFunction("omp_get_num_threads", _count)
"""In a function that the team runs: the number of threads of the team."""


_barrier = ExternalFunction("GOMP_barrier", types.void())


@kernel
def wait(parts):
    """Wait in a kernel until all parts have reached this call."""
    if parts > 1:
        _barrier()


class Shared:
    """A function of the address of packed arguments, for the team.

    It is compiled when it is first used, because compiling all kernels takes a minute or two and a
    run needs only some of them.
    """

    __slots__ = ("_compiled", "_function", "_lock")

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function
        # Kept alive, because it owns the code at `address`.
        self._compiled: Any = None
        self._lock = Lock()

    @property
    def address(self) -> int:
        """The address of the compiled code."""
        if self._compiled is None:
            with self._lock:
                if self._compiled is None:
                    self._compiled = callback(self._function)
        address: int = self._compiled.address
        return address


def for_team(function: Callable[..., None]) -> Shared:
    """Make a function that `run` can run on the team."""
    return Shared(function)


@contextmanager
def single_threaded(enabled: bool) -> Iterator[None]:
    """Run kernels and torch's operations of the body on the calling thread only, if `enabled`.

    The other threads soon go idle, so their cores are free for other work.
    """
    before = torch.get_num_threads()
    if not enabled or before == 1 or _gomp is None:
        yield
        return
    # This sets the count for this thread only. torch.set_num_threads would also recreate another
    # pool, whose threads wait in a busy loop, and the engine does this at every step.
    _gomp.omp_set_num_threads(1)
    try:
        yield
    finally:
        _gomp.omp_set_num_threads(before)


def run(whole: Callable[..., None], shared: Shared, arguments: tuple[int, ...], work: int) -> None:
    """Run a kernel over `arguments`.

    `shared` runs on the whole team if `work` is at least `SHARED_FROM` elements, else on one
    thread. `whole` runs instead if torch has no team.
    """
    if _gomp is None:
        whole(*arguments, 0, 1)
        return
    # `shared` also for one thread, because `whole` would have to be compiled or loaded in addition.
    threads = torch.get_num_threads() if work >= SHARED_FROM else 1
    packed = (ctypes.c_int64 * len(arguments))(*arguments)
    _gomp.GOMP_parallel(ctypes.c_void_p(shared.address), packed, threads, 0)
