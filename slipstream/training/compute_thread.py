"""One thread that runs all blocking tensor work, in the order of submission.

So the event loop stays free, and two pieces of work never compete for cores. Share one compute
thread between trainer, reference and engine, and build the models on it, too. The reason is OpenMP:
each thread that runs a parallel operation gets its own pool of OpenMP threads. If the pools have
more threads than there are cores, threads block and wake up at each operation, which is slow
(figures: `docs/log/threads.md`). torch's number of threads is not changed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from slipstream.training.protocol import TrainFuture

T = TypeVar("T")


class ComputeThread:
    """A work queue and the thread that runs it. Backends and engines may share one."""

    def __init__(self, name: str = "training") -> None:
        self._executor = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix=name, initializer=self._remember
        )
        self._ident: int | None = None

    def _remember(self) -> None:
        self._ident = threading.get_ident()

    @property
    def executor(self) -> ThreadPoolExecutor:
        """The executor behind the queue, for an engine that shares it."""
        return self._executor

    def submit(self, work: Callable[[], T]) -> TrainFuture[T]:
        """Queue `work` and return a future at once."""
        return TrainFuture(self._executor.submit(work))

    def run(self, work: Callable[[], T]) -> T:
        """Run `work` on the thread and block until it is done. Do not call this on an event
        loop."""
        if threading.get_ident() == self._ident:
            return work()
        return self.submit(work).wait()

    def close(self) -> None:
        """Finish the queued work and end the thread."""
        self._executor.shutdown(wait=True)
