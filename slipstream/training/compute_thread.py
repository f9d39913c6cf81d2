"""One thread on which all blocking work on tensors runs, in the order in which it was submitted.

Knows nothing about models. The event loop stays free, and two pieces of work never compete for the
cores. Share one between trainer, reference and engine, and build the models on it, too: every
thread that runs a parallel operation gets a team of OpenMP threads of its own, and once teams have
more threads than there are cores, they sleep and wake at each operation instead of waiting for the
next one (figures: `docs/log/threads.md`). torch's thread count is left as the program set it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from slipstream.training.protocol import TrainFuture

T = TypeVar("T")


class ComputeThread:
    """A queue of work and the thread that works it off. Backends and engines may share one."""

    def __init__(self, name: str = "training") -> None:
        self._executor = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix=name, initializer=self._remember
        )
        self._ident: int | None = None

    def _remember(self) -> None:
        self._ident = threading.get_ident()

    @property
    def executor(self) -> ThreadPoolExecutor:
        """The queue itself, for an engine that shares it."""
        return self._executor

    def submit(self, work: Callable[[], T]) -> TrainFuture[T]:
        """Queue `work`; returns at once."""
        return TrainFuture(self._executor.submit(work))

    def run(self, work: Callable[[], T]) -> T:
        """Queue `work` and block until it is done: for callers that are no event loop."""
        if threading.get_ident() == self._ident:
            return work()
        return self.submit(work).wait()

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        self._executor.shutdown(wait=True)
