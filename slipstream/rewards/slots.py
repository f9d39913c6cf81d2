"""Limits how many calls of a reward function run at once.

Calls that use the CPU slow each other down, because Python runs one thread at a time. Calls that
wait for a service or a program do not. Used by `runner`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, suppress

import anyio
import anyio.lowlevel

COMPUTING = 4
"""Number of concurrent calls that are always allowed."""

MAX_AT_ONCE = 256
"""Maximum number of concurrent calls while the running ones only wait."""

_PROBE_S = 0.01
"""Seconds over which CPU time of the running calls is measured before another call may start."""

_BUSY = 0.25
"""Share of one CPU core from which the running calls together count as computing."""


class Slots:
    """Allows `number` concurrent calls. None is 4, and up to `MAX_AT_ONCE` while calls only wait.

    `computed` returns the CPU seconds of each running call under an arbitrary key. A value is None
    if the call has not started, or if the system does not provide the time.
    """

    def __init__(
        self, number: int | None, computed: Callable[[], Mapping[int, float | None]]
    ) -> None:
        self._number, self._computed = number, computed
        self._running = self._ahead = 0
        self._turn: anyio.Lock | None = None
        self._freed: anyio.Event | None = None
        self._loop: object = None

    def one(self, *, waits: bool = False) -> AbstractAsyncContextManager[None]:
        """Hold a slot during the body. `waits`: the call is known to use no CPU time."""
        return _Slot(self, waits)

    async def take(self, *, waits: bool) -> None:
        """Wait for a slot and take it."""
        # Locks belong to one event loop, and this object may outlive it.
        loop = anyio.lowlevel.current_token()
        if self._turn is None or self._loop != loop:
            self._turn, self._loop, self._running = anyio.Lock(), loop, 0
        always = MAX_AT_ONCE if waits else COMPUTING
        if self._turn.locked() or self._running >= (self._number or always):
            async with self._turn:
                await self._room(always)
                self._running += 1
        else:
            # Without the cost of a lock.
            self._ahead = 0
            self._running += 1

    def release(self) -> None:
        """Give the slot to another call."""
        self._running -= 1
        if self._freed is not None:
            self._freed.set()

    async def _room(self, always: int) -> None:
        """Wait until another call may start. Only one task waits here at a time."""
        always = self._number or always
        while self._running >= always:
            limit = self._number or MAX_AT_ONCE
            if self._ahead and self._running < limit:
                self._ahead -= 1
                return
            self._freed = anyio.Event()
            if self._running >= limit:
                await self._freed.wait()
                continue
            before = self._computed()
            with anyio.move_on_after(_PROBE_S) as probe:
                await self._freed.wait()
            if not probe.cancelled_caught:
                continue  # a call has ended, so the measurement is incomplete
            # Allow twice as many calls. One by one it would take seconds to reach the maximum.
            self._ahead = self._running if _only_wait(before, self._computed()) else 0
        self._ahead = 0


class _Slot(AbstractAsyncContextManager[None]):
    """A slot that is held during a body. A class, because it is faster than a generator."""

    __slots__ = ("_slots", "_waits")

    def __init__(self, slots: Slots, waits: bool) -> None:
        self._slots, self._waits = slots, waits

    async def __aenter__(self) -> None:
        await self._slots.take(waits=self._waits)

    async def __aexit__(self, *_: object) -> None:
        self._slots.release()


def _only_wait(before: Mapping[int, float | None], after: Mapping[int, float | None]) -> bool:
    """Return whether the calls used almost no CPU time between the two measurements."""
    used = 0.0
    for name in before.keys() & after.keys():
        early, late = before[name], after[name]
        if early is None or late is None:
            return False
        used += late - early
    return used < _BUSY * _PROBE_S


class ThreadClock:
    """CPU time of the thread that runs a call."""

    def __init__(self) -> None:
        self._clock: int | None = None

    def begin(self) -> None:
        """Start the clock. Must be called first, by the thread itself."""
        if hasattr(time, "pthread_getcpuclockid"):
            self._clock = time.pthread_getcpuclockid(threading.get_ident())

    def seconds(self) -> float | None:
        """Return CPU seconds. None before `begin`, and if the system does not provide them."""
        if self._clock is not None:
            with suppress(OSError):
                return time.clock_gettime(self._clock)
        return None
