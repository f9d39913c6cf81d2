"""How many calls of a reward function run at once.

Calls that compute take turns: Python runs one thread at a time, and each that is added makes the
others late. Calls that wait, for a service or a program, do not. Used by `runner`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress

import anyio
import anyio.lowlevel

COMPUTING = 4
"""Calls that may run whatever they do."""

MOST = 256
"""Calls that may run where the others wait."""

_LOOK_S = 0.01
"""How long running calls are looked at before another one may begin."""

_BUSY = 0.25
"""Share of one processor that running calls together take where they compute."""


class Slots:
    """At most `number` calls at once, or, where it is None, four, and up to `MOST` while those that
    run compute nothing.

    `computed` tells the seconds of processor time of each running call, by any name for it; None
    for one that has not begun, or where the system does not tell.
    """

    def __init__(
        self, number: int | None, computed: Callable[[], Mapping[int, float | None]]
    ) -> None:
        self._number, self._computed = number, computed
        self._running = self._ahead = 0
        self._turn: anyio.Lock | None = None
        self._freed: anyio.Event | None = None
        self._loop: object = None

    @asynccontextmanager
    async def one(self, *, waits: bool = False) -> AsyncIterator[None]:
        """In the body a call may run; `waits`: it is known to compute nothing."""
        # Locks belong to one event loop; what uses this may outlive it.
        loop = anyio.lowlevel.current_token()
        if self._turn is None or self._loop != loop:
            self._turn, self._loop, self._running = anyio.Lock(), loop, 0
        async with self._turn:
            await self._room(MOST if waits else COMPUTING)
            self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if self._freed is not None:
                self._freed.set()

    async def _room(self, always: int) -> None:
        """Wait until another call may begin. Only one waits here at a time."""
        always = self._number or always
        while self._running >= always:
            most = self._number or MOST
            if self._ahead and self._running < most:
                self._ahead -= 1
                return
            self._freed = anyio.Event()
            if self._running >= most:
                await self._freed.wait()
                continue
            before = self._computed()
            with anyio.move_on_after(_LOOK_S) as look:
                await self._freed.wait()
            if not look.cancelled_caught:
                continue  # one has ended: whether the others wait is not known yet
            # Twice as many, then: one by one it would be seconds until all wait.
            self._ahead = self._running if _waits(before, self._computed()) else 0
        self._ahead = 0


def _waits(before: Mapping[int, float | None], after: Mapping[int, float | None]) -> bool:
    """Whether calls have computed next to nothing meanwhile."""
    taken = 0.0
    for name in before.keys() & after.keys():
        early, late = before[name], after[name]
        if early is None or late is None:
            return False
        taken += late - early
    return taken < _BUSY * _LOOK_S


class ThreadClock:
    """Processor time of the thread that runs a call."""

    def __init__(self) -> None:
        self._clock: int | None = None

    def begin(self) -> None:
        """To be called by that thread, first."""
        if hasattr(time, "pthread_getcpuclockid"):
            self._clock = time.pthread_getcpuclockid(threading.get_ident())

    def seconds(self) -> float | None:
        """None before it has begun, and where the system does not tell."""
        if self._clock is not None:
            with suppress(OSError):
                return time.clock_gettime(self._clock)
        return None
