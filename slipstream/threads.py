"""Between an event loop and the threads that work for it.

Waking the loop never makes a thread wait: a compute thread that waited would do nothing meanwhile.
Knows nothing of what the work is.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import Context
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


async def arrival(work: Future[Any]) -> None:
    """Wait until `work` is done, failed or cancelled. Being cancelled leaves the work alone."""
    arrived = asyncio.Event()
    loop = asyncio.get_running_loop()

    def wake(_: object) -> None:
        # A loop that has ended in the meantime has nobody left to wake.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(arrived.set)

    work.add_done_callback(wake)
    await arrived.wait()


class DaemonThreads:
    """Threads for work that may never return: such a thread is lost, but does not keep the process
    from ending. One that has done its work takes more, and ends when none has come for a while:
    starting a thread makes the caller wait until it runs, which takes milliseconds beside a busy
    one."""

    def __init__(self, name: str, idle_s: float = 10.0) -> None:
        self._name, self._idle_s = name, idle_s
        self._lock = threading.Lock()
        # The last one that had work comes first: its memory is still in the caches.
        self._idle: list[SimpleQueue[Callable[[], None]]] = []

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Have `work` done now, however much else is under way: what it returns or raises."""
        answer: Future[T] = Future()

        def run() -> None:
            try:
                # As in a thread of its own: what others have set (decimal's precision) is not set.
                result = Context().run(work)
            except BaseException as error:
                answer.set_exception(error)
            else:
                answer.set_result(result)

        with self._lock:
            inbox = self._idle.pop() if self._idle else None
        if inbox is None:
            inbox = SimpleQueue()
            thread = threading.Thread(target=self._serve, args=(inbox,), name=self._name)
            thread.daemon = True
            thread.start()
        inbox.put(run)
        return answer

    def _serve(self, inbox: SimpleQueue[Callable[[], None]]) -> None:
        while True:
            try:
                run = inbox.get(timeout=self._idle_s)
            except Empty:
                with self._lock:
                    if inbox not in self._idle:
                        continue  # work is on its way
                    self._idle.remove(inbox)
                return
            run()
            del run  # and what it holds
            with self._lock:
                self._idle.append(inbox)


def usable_cores(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores that this process may use: its affinity, and the quota of its control group, as
    containers have one (version 2, `cpu.max`; version 1, `cpu/cpu.cfs_quota_us`)."""
    affine = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if affine else os.cpu_count() or 1
    return max(1, math.ceil(min(cores, _quota(root))))


def _quota(root: Path) -> float:
    """Of processor time, in cores."""
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            words = [word for file in files for word in (root / file).read_text().split()]
            quota, period = map(float, words)
        except (OSError, ValueError):
            continue  # There is no such group, or no limit in it ("max").
        if quota > 0:
            return quota / period
    return math.inf
