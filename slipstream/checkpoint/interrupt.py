"""Signal handling: the first Ctrl-C finishes the step and saves, the second stops at once.

Knows nothing of steps or checkpoints. A loop checks `requested` at each point where it can stop.
Called by the loops.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class GracefulInterrupt:
    """Context manager: a first SIGINT or SIGTERM only sets `requested`, a later SIGINT interrupts.

    `plan` is the text that tells the user what happens after the first signal. `on_second` is
    called once, before the second SIGINT takes effect. That SIGINT cancels the tasks of a running
    event loop; without an event loop, and at the third SIGINT, KeyboardInterrupt is raised. A
    repeated SIGTERM has no effect, because cluster managers send it to the process and to its
    group. Python delivers signals only to the main thread; in other threads only `request()` sets
    the flag. The previous handlers are restored on exit.
    """

    def __init__(
        self,
        plan: str = "finishing the current step, then saving a checkpoint",
        *,
        on_second: Callable[[], object] | None = None,
    ) -> None:
        self._plan = plan
        self._on_second = on_second
        self._event = threading.Event()
        self._previous: dict[signal.Signals, Any] = {}
        self._cancelled = False
        self.signal: signal.Signals | None = None

    @property
    def requested(self) -> bool:
        """Whether the caller should stop at the next safe point."""
        return self._event.is_set()

    def request(self) -> None:
        """Request a stop, like a first signal. Safe to call from any thread."""
        self._event.set()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, previous in self._previous.items():
            # None: the handler was installed by C code; Python can neither read nor restore it.
            signal.signal(number, signal.SIG_DFL if previous is None else previous)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            if number == signal.SIGINT:
                on_second, self._on_second = self._on_second, None
                if on_second is not None:
                    on_second()
                if self._cancelled or not _cancel_tasks():
                    raise KeyboardInterrupt
                self._cancelled = True
            return
        self.signal = signal.Signals(number)
        self._event.set()
        text = f"\n{self.signal.name}: {self._plan}. Press Ctrl-C again to stop at once.\n"
        # print is not reentrant: the signal may arrive during a buffered write to this stream.
        try:
            os.write(2, text.encode())
        except OSError:
            return  # the terminal was closed; the flag is already set


def _cancel_tasks() -> bool:
    """Cancel all tasks of this thread's event loop. Returns False if no loop is running.

    An exception raised in a signal handler would surface in an arbitrary callback of the loop and
    get lost there. Therefore the tasks are cancelled instead.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return False

    def cancel() -> None:
        for task in asyncio.all_tasks(loop):
            task.cancel()

    loop.call_soon_threadsafe(cancel)
    return True
