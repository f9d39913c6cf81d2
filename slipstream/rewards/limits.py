"""Requests and tokens a minute, and how many at once: what a service allows.

Used by `limited`. Knows nothing of rewards; the clock is given, so that tests need no time.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel

from slipstream.errors import ConfigError

_MINUTE = 60.0


class Pace:
    """So many units a minute, one after the other: who comes waits until those before are paid for.

    Evenly, so that in no minute there are more: a bucket that may be full would let twice as many
    pass in its first one.
    """

    def __init__(self, per_minute: float, clock: Callable[[], float]) -> None:
        self._seconds = _MINUTE / per_minute
        self._clock = clock
        self._free = -math.inf

    def reserve(self, units: float) -> float:
        """Seconds until these units may begin; those that come later wait for them, too."""
        now = self._clock()
        begin = max(now, self._free)
        self._free = begin + units * self._seconds
        return begin - now


class Limits:
    """At most `max_rpm` requests and `max_tpm` tokens a minute, and `max_concurrent` requests at
    once; None: no such limit. Raises ConfigError for limits that nothing could pass."""

    def __init__(
        self,
        *,
        max_rpm: float | None = None,
        max_tpm: float | None = None,
        max_concurrent: int | None = None,
        clock: Callable[[], float] = anyio.current_time,
        sleep: Callable[[float], Awaitable[object]] = anyio.sleep,
    ) -> None:
        given = {"max_rpm": max_rpm, "max_tpm": max_tpm, "max_concurrent": max_concurrent}
        for name, value in given.items():
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(
                    f"reward_model.reward_kwargs.{name}={value} lets nothing pass; set a number "
                    "above 0, or null for no limit"
                )
        self._requests = None if max_rpm is None else Pace(max_rpm, clock)
        self._tokens = None if max_tpm is None else Pace(max_tpm, clock)
        self._most = max_concurrent
        self._slots: anyio.CapacityLimiter | None = None
        self._loop: object = None
        self._sleep = sleep

    @asynccontextmanager
    async def request(self, tokens: float) -> AsyncIterator[None]:
        """In the body a request of about so many tokens is under way."""
        slots = self._limiter()
        if slots is None:
            await self._in_turn(tokens)
            yield
            return
        async with slots:
            await self._in_turn(tokens)
            yield

    async def _in_turn(self, tokens: float) -> None:
        waits = [0.0]
        if self._requests is not None:
            waits.append(self._requests.reserve(1))
        if self._tokens is not None:
            waits.append(self._tokens.reserve(tokens))
        if (longest := max(waits)) > 0:
            await self._sleep(longest)

    def _limiter(self) -> anyio.CapacityLimiter | None:
        if self._most is None:
            return None
        # A limiter belongs to one event loop; a manager may outlive it.
        loop = anyio.lowlevel.current_token()
        if self._slots is None or self._loop != loop:
            self._slots, self._loop = anyio.CapacityLimiter(self._most), loop
        return self._slots
