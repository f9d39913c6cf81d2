"""Deadlines for the stages of a training step.

A stage that exceeds its deadline is cancelled and raises `StageTimeoutError`. Some stages cannot be
cancelled: a kernel or library call that never returns, on a thread that Python cannot stop. For
these, `on_stuck` is called after an extra grace period, from a separate thread; the command line
ends the process there.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import NoReturn, Protocol, TypeVar, runtime_checkable

import anyio

from slipstream.errors import StageTimeoutError
from slipstream.threads import DaemonThreads, arrival

T = TypeVar("T")

_THREADS = DaemonThreads("stage")

REMEDY = "raise trainer.stage_timeout_s if it only needs more time"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Deadline of each stage (`timeout_s`), and extra time before `on_stuck` (`grace_s`), in
    seconds."""

    timeout_s: float = 3600.0
    grace_s: float = 30.0
    on_stuck: Callable[[str], None] | None = None

    @contextlib.asynccontextmanager
    async def stage(
        self, name: str, waiting_for: str, *, timeout_s: float | None = None
    ) -> AsyncIterator[None]:
        """Limit the time of the body. Raises StageTimeoutError, which names the stage and what it
        waited for."""
        seconds = self.timeout_s if timeout_s is None else timeout_s
        message = f"{name}: {waiting_for} was not done after {seconds:g} s; {REMEDY}"
        with self.last_resort(message, seconds):
            with anyio.move_on_after(seconds) as scope:
                yield
            if scope.cancelled_caught:
                raise StageTimeoutError(message)

    @contextlib.contextmanager
    def last_resort(self, message: str, seconds: float = 0.0) -> Iterator[None]:
        """Call `on_stuck(message)` if the body still runs `grace_s` after `seconds` have passed."""
        if self.on_stuck is None:
            yield
            return
        timer = threading.Timer(seconds + self.grace_s, self.on_stuck, [message])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


async def run_in_daemon(work: Callable[[], T]) -> T:
    """Run blocking work on a thread that does not keep the process from ending.

    Cancelling does not stop the thread: it ends with its work or with the process.
    """
    result = _THREADS.submit(work)
    await arrival(result)
    return result.result()


@runtime_checkable
class _Closable(Protocol):
    def close(self) -> None: ...


def close_parts(deadlines: Deadlines, *parts: object) -> None:
    """Close all `parts` that can be closed; waits for their current work.

    If that work never ends, the message is the error that led here, which would otherwise be lost.
    """
    message = "closing: a thread of the engine or the trainer does not return"
    with deadlines.last_resort(str(sys.exc_info()[1] or "") or message):
        for part in parts:
            if isinstance(part, _Closable):
                part.close()


@contextlib.contextmanager
def frozen_interpreter_ends(seconds: float) -> Iterator[None]:
    """End the process with exit status 1 if no Python code runs for `seconds` during the body.

    Prints the stack of every thread to stderr. Timers and signal handlers do not help in this case:
    they are Python code, and the stuck call never releases the interpreter lock. An example is a
    regular expression in a reward function that backtracks forever.
    """
    try:
        output = sys.stderr.fileno()
    except (OSError, ValueError):  # stderr was replaced by an object without a file descriptor
        yield
        return
    over = threading.Event()

    def postpone() -> None:
        while True:
            faulthandler.dump_traceback_later(seconds, exit=True, file=output)
            if over.wait(min(seconds / 4, 5.0)):
                return

    thread = threading.Thread(target=postpone, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        faulthandler.cancel_dump_traceback_later()


class CpuLimitError(Exception):
    """The body of `cpu_limit` needed more processor time than its limit."""


class _LateError(BaseException):
    """Raised by the watcher in the thread of a body. No handler of exceptions in the body stops
    it."""


@dataclass(slots=True, eq=False)
class _Body:
    thread: int
    clock: int
    until: float
    fired: bool = False


_bodies: dict[int, _Body] = {}
_watcher: threading.Thread | None = None
_WATCH_S = 0.5


@contextlib.contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise CpuLimitError in the body after `seconds` of processor time of its thread.

    It works in every thread, and is cheap: one thread watches all bodies. It stops loops of Python
    code, but no single operation of C code. Bodies are not nested.
    """
    global _watcher
    ident = threading.get_ident()
    clock = time.pthread_getcpuclockid(ident)
    body = _Body(ident, clock, time.clock_gettime(clock) + seconds)
    _bodies[ident] = body
    if _watcher is None or not _watcher.is_alive():
        _watcher = threading.Thread(target=_watch, name="cpu-limits", daemon=True)
        _watcher.start()
    try:
        try:
            yield
        except _LateError:
            body.fired = False
            raise
        finally:
            _bodies.pop(ident, None)
            # The watcher may have decided in the last moment: its exception arrives here.
            for _ in range(100_000 if body.fired else 0):
                pass
    except _LateError:
        raise CpuLimitError(f"more than {seconds:g} s of processor time") from None


def _watch() -> None:
    while True:
        time.sleep(_WATCH_S)
        for ident, body in list(_bodies.items()):
            late = time.clock_gettime(body.clock) > body.until if ident in _bodies else False
            if late and not body.fired and _bodies.get(ident) is body:
                body.fired = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(ident), ctypes.py_object(_LateError)
                )


def end_process(message: str, status: int) -> NoReturn:
    """Print `message` and end the process at once, whatever other threads do.

    A resumed run reads no half-written files after this, as after a kill.
    """
    show_cursor = b"\x1b[?25h" if sys.stderr.isatty() else b""
    # Not through `sys.stderr`: the main thread may hold its lock.
    with contextlib.suppress(OSError):
        os.write(2, show_cursor + f"{message}\n".encode())
    os._exit(status)
