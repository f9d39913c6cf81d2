"""Threads that work for an event loop, and the number of cores that this process may use.

A thread never waits for the event loop: a compute thread that waits does no work.
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


async def arrival(work: Future[Any], timeout_s: float | None = None) -> None:
    """Wait until `work` has finished, failed or been cancelled, at most `timeout_s` seconds.

    Neither the timeout nor a cancelled wait cancels `work`.
    """
    loop = asyncio.get_running_loop()
    arrived = loop.create_future()

    def wake() -> None:
        if not arrived.done():
            arrived.set_result(None)

    def wake_from_thread(_: object) -> None:
        # If the loop has ended in the meantime, nobody waits any more.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(wake)

    work.add_done_callback(wake_from_thread)
    # With a cancel scope instead, short answers are scored 7 % slower.
    timer = None if timeout_s is None else loop.call_later(timeout_s, wake)
    try:
        await arrived
    finally:
        if timer is not None:
            timer.cancel()


class DaemonThreads:
    """Threads for work that may never return. They do not keep the process from ending.

    A thread that has finished its work waits `idle_s` seconds for more work before it ends. Reuse
    saves time: starting a thread blocks the caller until it runs, which takes milliseconds when
    another thread is busy.
    """

    def __init__(self, name: str, idle_s: float = 10.0) -> None:
        self._name, self._idle_s = name, idle_s
        self._lock = threading.Lock()
        # The thread that worked last comes first: its memory is still in the CPU caches.
        self._idle: list[SimpleQueue[Callable[[], None]]] = []

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` now, on an idle or a new thread; the future holds its result or exception."""
        answer: Future[T] = Future()

        def run() -> None:
            try:
                # A fresh context, as in a new thread: context variables of earlier work are not
                # seen.
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
                        continue  # `submit` is about to send work
                    self._idle.remove(inbox)
                return
            run()
            del run  # and the objects it refers to
            with self._lock:
                self._idle.append(inbox)


def usable_cores(root: Path = Path("/sys/fs/cgroup")) -> int:
    """The number of cores that this process may use: its CPU affinity, limited by the quota of its
    control group (version 2: `cpu.max`; version 1: `cpu/cpu.cfs_quota_us`)."""
    affine = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if affine else os.cpu_count() or 1
    return max(1, math.ceil(min(cores, _quota(root))))


def _quota(root: Path) -> float:
    """The CPU quota of the control group, in cores; infinity without a quota."""
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            words = [word for file in files for word in (root / file).read_text().split()]
            quota, period = map(float, words)
        except (OSError, ValueError):
            continue  # No such control group, or no limit ("max").
        if quota > 0:
            return quota / period
    return math.inf
