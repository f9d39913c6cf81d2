"""Rate limits: requests per minute, tokens per minute, and concurrent requests.

Used by `limited`. Knows nothing of rewards. The clock is a parameter, so that tests need no
waiting.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel

from slipstream.errors import ConfigError

_MINUTE = 60.0


class RateLimit:
    """Spaces out units evenly at a rate per minute; a later caller waits for all earlier ones.

    Even spacing keeps every minute within the limit. A token bucket that starts full would let
    twice as many units pass in its first minute.
    """

    def __init__(self, per_minute: float, clock: Callable[[], float]) -> None:
        self._seconds = _MINUTE / per_minute
        self._clock = clock
        self._free = -math.inf

    def reserve(self, units: float) -> float:
        """Reserve `units` and return the seconds to wait before using them."""
        now = self._clock()
        begin = max(now, self._free)
        self._free = begin + units * self._seconds
        return begin - now


class Limits:
    """Limits of `max_rpm` requests and `max_tpm` tokens per minute, and of concurrent requests.

    None means no limit. Raises ConfigError for a limit of 0 or less.
    """

    def __init__(
        self,
        *,
        max_rpm: float | None = None,
        max_tpm: float | None = None,
        max_concurrent: int | None = None,
        clock: Callable[[], float] = anyio.current_time,
        sleep: Callable[[float], Awaitable[object]] = anyio.sleep,
    ) -> None:
        limits = {"max_rpm": max_rpm, "max_tpm": max_tpm, "max_concurrent": max_concurrent}
        for name, value in limits.items():
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(
                    f"reward_model.reward_kwargs.{name}={value} allows no request; set a number "
                    "above 0, or null for no limit"
                )
        if max_concurrent is not None and not isinstance(max_concurrent, int):
            raise ConfigError(
                f"reward_model.reward_kwargs.max_concurrent={max_concurrent} must be an integer"
            )
        self._requests = None if max_rpm is None else RateLimit(max_rpm, clock)
        self._tokens = None if max_tpm is None else RateLimit(max_tpm, clock)
        self._max_concurrent = max_concurrent
        self._slots: anyio.CapacityLimiter | None = None
        self._loop: object = None
        self._sleep = sleep

    @asynccontextmanager
    async def request(self, tokens: float) -> AsyncIterator[None]:
        """Hold a request of about `tokens` tokens during the body; waits until it is allowed."""
        slots = self._limiter()
        if slots is None:
            await self._wait(tokens)
            yield
            return
        async with slots:
            await self._wait(tokens)
            yield

    async def _wait(self, tokens: float) -> None:
        waits = [0.0]
        if self._requests is not None:
            waits.append(self._requests.reserve(1))
        if self._tokens is not None:
            waits.append(self._tokens.reserve(tokens))
        if (longest := max(waits)) > 0:
            await self._sleep(longest)

    def _limiter(self) -> anyio.CapacityLimiter | None:
        if self._max_concurrent is None:
            return None
        # A limiter belongs to one event loop, and the manager may outlive that loop.
        loop = anyio.lowlevel.current_token()
        if self._slots is None or self._loop != loop:
            self._slots, self._loop = anyio.CapacityLimiter(self._max_concurrent), loop
        return self._slots
