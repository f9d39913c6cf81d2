"""An event loop in a daemon thread, for users' async functions.

On the run's own event loop, a function that blocks, ignores its cancellation, or cancels other
tasks would stop the run. Here it only loses its own answer. Used by `runner`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from slipstream.threads import arrival

T = TypeVar("T")

GRACE_S = 1.0
"""Seconds that a cancelled call has to end before it counts as abandoned."""

_CANCELS = 10
"""Number of cancellations during `GRACE_S`: a function may catch one of them by mistake."""


class UserLoop:
    """Runs async functions on one event loop, which is started at the first call.

    If the loop stops answering, because a function blocks it, later calls get a new loop.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: _LoopThread | None = None
        self._stuck: list[_LoopThread] = []
        self._abandoned: list[Future[Any]] = []

    @property
    def abandoned(self) -> int:
        """Number of calls that exceeded their deadline and still run."""
        self._abandoned = [call for call in self._abandoned if not call.done()]
        return len(self._abandoned)

    @property
    def stuck(self) -> int:
        """Number of loops that stopped answering and whose threads still run."""
        self._stuck = [thread for thread in self._stuck if thread.is_alive()]
        return len(self._stuck)

    async def run(
        self,
        function: Callable[[], Awaitable[T]],
        timeout_s: float,
        failed: Callable[[BaseException], T],
    ) -> T | None:
        """Return the result of `await function()`, or None after `timeout_s` seconds.

        If the function raises, the result is that of `failed(error)`. The time counts from the
        start of the function. A call that does not end within `GRACE_S` seconds of its cancellation
        is abandoned.
        """
        while True:
            thread = self._current()
            call = _Call(function, failed)
            if not thread.submit(call):
                self._retire(thread)
                continue
            if await self._started(call, thread):
                return await self._finish(call, thread, timeout_s)

    async def _started(self, call: _Call[T], thread: _LoopThread) -> bool:
        """Wait until the call starts. Returns False if its loop stopped answering before that."""
        try:
            await arrival(call.started)
        finally:
            if not call.started.done() and not call.started.cancel():
                thread.cancel(call)  # it started just now
        return not call.started.cancelled()

    async def _finish(self, call: _Call[T], thread: _LoopThread, timeout_s: float) -> T | None:
        try:
            await arrival(call.result, timeout_s)
        except BaseException:  # the caller was cancelled
            thread.cancel(call)
            self._abandoned.append(call.result)
            raise
        if call.result.done():
            return None if call.result.cancelled() else call.result.result()
        answered = thread.cancel(call)
        for _ in range(_CANCELS):
            await arrival(call.result, GRACE_S / _CANCELS)
            if call.result.done():
                return None
            thread.cancel(call)
        self._abandoned.append(call.result)
        if not answered.done():
            self._retire(thread)
        return None

    def _current(self) -> _LoopThread:
        if self._thread is None:
            self._thread = _LoopThread(self._name)
        return self._thread

    def _retire(self, thread: _LoopThread) -> None:
        if thread is self._thread:
            self._thread = None
            self._stuck.append(thread)
            thread.retire()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at exit, modules may be gone
            if self._thread is not None:
                self._thread.retire()


class _Call(Generic[T]):
    """A call of `function`. If it raises, its result is that of `failed`.

    The loop's thread sets `started`, `task` and `result`. If `started` is cancelled before, the
    call never starts.
    """

    def __init__(
        self, function: Callable[[], Awaitable[T]], failed: Callable[[BaseException], T]
    ) -> None:
        self.function, self.failed = function, failed
        self.started: Future[None] = Future()
        self.result: Future[T] = Future()
        self.task: asyncio.Task[None] | None = None


class _LoopThread:
    """A daemon thread with an event loop that survives everything its tasks raise."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._calls: set[_Call[Any]] = set()
        self._lock = threading.Lock()
        self._retired = self._over = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def is_alive(self) -> bool:
        """Return whether the thread still runs."""
        return self._thread.is_alive()

    def submit(self, call: _Call[Any]) -> bool:
        """Start a call as soon as the loop is free. Returns False if the loop has ended."""
        with self._lock:
            if self._retired:
                return False
            self._calls.add(call)
        return self._soon(lambda: self._start(call))

    def cancel(self, call: _Call[Any]) -> Future[None]:
        """Cancel a call. The future is done when the loop has done so."""
        answered: Future[None] = Future()

        def act() -> None:
            try:
                if call.task is not None:
                    call.task.cancel()
            finally:
                answered.set_result(None)

        self._soon(act)
        return answered

    def retire(self) -> None:
        """Accept no more calls, drop those that have not started, and end after the others."""
        with self._lock:
            self._retired = True
            waiting = list(self._calls)
        for call in waiting:
            call.started.cancel()
        self._soon(self._end_if_idle)

    def _soon(self, act: Callable[[], object]) -> bool:
        try:
            self._loop.call_soon_threadsafe(act)
        except RuntimeError:  # the loop is closed
            return False
        return True

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._over:
            # A task that raises KeyboardInterrupt or SystemExit, or calls `stop`, ends this method.
            with contextlib.suppress(BaseException):
                self._loop.run_forever()
        self._loop.close()

    def _start(self, call: _Call[Any]) -> None:
        task = self._loop.create_task(_run(call))
        task.add_done_callback(lambda _: self._ended(call))

    def _ended(self, call: _Call[Any]) -> None:
        if not call.started.done():
            self._start(call)  # another call's function cancelled all tasks before this one started
            return
        call.result.cancel()  # has no effect on a result
        with self._lock:
            self._calls.discard(call)
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        if self._retired and not self._calls:
            self._over = True
            self._loop.stop()


async def _run(call: _Call[T]) -> None:
    if not call.started.set_running_or_notify_cancel():
        return
    call.task = asyncio.current_task()
    call.started.set_result(None)
    try:
        result = await call.function()
    except BaseException as error:
        result = call.failed(error)
    call.result.set_result(result)
