"""The first Ctrl-C finishes the step and saves; the second one stops at once.

Knows nothing of steps or checkpoints: a loop asks `requested` where it can stop. Called by the
loops.
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
    """While entered, SIGINT and SIGTERM only set `requested`; a SIGINT after that interrupts.

    `plan` tells the user what happens after the first signal; `on_second` is called once, before
    the second one interrupts: an event loop by cancelling its tasks, at a third one and elsewhere
    by KeyboardInterrupt. A repeated SIGTERM changes nothing:
    cluster managers send it to the process and to its group. Outside of the main thread Python
    delivers no signals; there only `request()` sets the flag. Handlers are restored on exit.
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
        """Whether to stop at the next safe point."""
        return self._event.is_set()

    def request(self) -> None:
        """Ask for a stop as a first signal does, from any thread."""
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
            # None: a handler that C code installed, which Python can neither see nor put back.
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
        # Not print: a handler may run inside a buffered write to the same stream.
        try:
            os.write(2, text.encode())
        except OSError:
            return  # the terminal is gone, and the flag is what counts


def _cancel_tasks() -> bool:
    """Have the event loop of this thread cancel its tasks; whether there is one. An exception from
    a handler would come up in whatever callback of the loop is being run, and be lost there."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return False

    def cancel() -> None:
        for task in asyncio.all_tasks(loop):
            task.cancel()

    loop.call_soon_threadsafe(cancel)
    return True
