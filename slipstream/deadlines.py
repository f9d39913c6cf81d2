"""Deadlines: each stage of a step ends in time, or the run ends and names it.

A stage that can be cancelled raises `StageTimeoutError`. One that cannot (a kernel or a foreign
library that never returns, on a thread that Python cannot stop) is given some grace and then
`on_stuck` is called, from a thread of its own: the command line ends the process there. Knows
nothing of what the stages do. Called by the loops.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
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
    """`timeout_s` is the deadline of each stage, `grace_s` what is added before `on_stuck`."""

    timeout_s: float = 3600.0
    grace_s: float = 30.0
    on_stuck: Callable[[str], None] | None = None

    @contextlib.asynccontextmanager
    async def stage(
        self, name: str, waiting_for: str, *, timeout_s: float | None = None
    ) -> AsyncIterator[None]:
        """Bound the body. Raises StageTimeoutError naming the stage and what it waited for."""
        seconds = self.timeout_s if timeout_s is None else timeout_s
        message = f"{name}: {waiting_for} was not done after {seconds:g} s; {REMEDY}"
        with self.last_resort(message, seconds):
            with anyio.move_on_after(seconds) as scope:
                yield
            if scope.cancelled_caught:
                raise StageTimeoutError(message)

    @contextlib.contextmanager
    def last_resort(self, message: str, seconds: float = 0.0) -> Iterator[None]:
        """Call `on_stuck(message)` where the body has not ended `grace_s` after `seconds`."""
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
    """Run blocking work in a thread that does not keep the process from ending.

    Cancelling leaves the thread alone: it ends with its work or with the process.
    """
    result = _THREADS.submit(work)
    await arrival(result)
    return result.result()


@runtime_checkable
class _Closable(Protocol):
    def close(self) -> None: ...


def close_parts(deadlines: Deadlines, *parts: object) -> None:
    """Give back threads and files of those `parts` that have any; waits for the work under way.

    Work that never ends keeps the error from being seen that it led to, so that one is said.
    """
    message = "closing: a thread of the engine or the trainer does not return"
    with deadlines.last_resort(str(sys.exc_info()[1] or "") or message):
        for part in parts:
            if isinstance(part, _Closable):
                part.close()


@contextlib.contextmanager
def frozen_interpreter_ends(seconds: float) -> Iterator[None]:
    """End the process, with the stack of every thread on stderr, where no Python code has run for
    `seconds` in the body.

    Timers and signal handlers are Python, too: they cannot see a call that never gives up the
    interpreter, such as a regular expression that backtracks for ever in a reward function. Exit
    status 1.
    """
    try:
        output = sys.stderr.fileno()
    except (OSError, ValueError):  # replaced by something that is no file
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


def end_process(message: str, status: int) -> NoReturn:
    """Say why and end at once, whatever other threads do: as after a kill, nothing is half-written
    that a resumed run would read."""
    show_cursor = b"\x1b[?25h" if sys.stderr.isatty() else b""
    # The main thread may hold the lock of the buffered stream.
    with contextlib.suppress(OSError):
        os.write(2, show_cursor + f"{message}\n".encode())
    os._exit(status)
