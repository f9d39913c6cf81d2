"""Calls a user's function with a deadline, so that it can neither hang nor crash the run.

A synchronous function runs in a daemon thread. Python cannot stop a thread, so a call that never
returns is abandoned; daemon threads do not block the exit of the interpreter. An async function
runs on an event loop in a daemon thread (`user_loop`) and is cancelled at the deadline. Called by
the reward managers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import Any

from slipstream.errors import ConfigError, RewardError
from slipstream.rewards.results import CallOutcome, Reader, outcome_of
from slipstream.rewards.slots import MAX_AT_ONCE, Slots, ThreadClock
from slipstream.rewards.user_loop import UserLoop
from slipstream.rewards.workers import CALL_TIMEOUT_S
from slipstream.threads import DaemonThreads, arrival


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether `function` is async, or an object with an async `__call__`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - the method itself, not callability
    )


class DeadlineRunner:
    """Calls functions with a deadline.

    `num_workers` is the number of concurrent calls (None: decided by `Slots`). `max_abandoned` is
    how many threads hung calls may keep before `run` raises.
    """

    def __init__(
        self, *, timeout_s: float, num_workers: int | None = None, max_abandoned: int = 8
    ) -> None:
        if not 0.0 < timeout_s < float("inf"):
            raise ConfigError(
                f"reward_model.timeout_s {timeout_s} must be a positive number of seconds"
            )
        if num_workers is not None and num_workers < 1:
            raise ConfigError(f"reward_model.num_workers {num_workers} must be at least 1")
        self.timeout_s = timeout_s
        self.max_abandoned = max_abandoned
        self.timeouts = 0
        self._slots = Slots(num_workers, self._computed)
        self._clocks: dict[int, ThreadClock] = {}
        self._threads = DaemonThreads("reward")
        self._abandoned: list[Future[Any]] = []
        self._loop = UserLoop("reward-async")

    @property
    def abandoned(self) -> int:
        """Number of calls that exceeded their deadline and still run."""
        self._abandoned = [call for call in self._abandoned if not call.done()]
        return len(self._abandoned) + self._loop.abandoned

    async def run(
        self,
        function: Callable[[], Any],
        *,
        name: str,
        asynchronous: bool,
        reader: Reader | None = None,
        patience: float = 1.0,
    ) -> CallOutcome:
        """Call `function()` and return its outcome, read by `reader` (None: as one result).

        Whatever the function raises becomes a failure. `patience` multiplies the deadline of a
        synchronous function that has limits of its own, which do not count the time in which the
        machine is busy. Raises RewardError if too many of its calls hang; the error then names it.
        """
        reader = reader or Reader()
        async with self.slot(waits=asynchronous):
            self._check_abandoned(name)
            if asynchronous:
                return await self._run_async(functools.partial(reader.awaited, function))
            work = functools.partial(reader.outcome, function)
            return await self._run_in_thread(work, patience * self.timeout_s)

    def slot(self, *, waits: bool = False) -> AbstractAsyncContextManager[None]:
        """Return a context to hold during a call. `waits`: the call needs no CPU time here."""
        return self._slots.one(waits=waits)

    def _computed(self) -> dict[int, float | None]:
        return {name: clock.seconds() for name, clock in self._clocks.items()}

    def _timed_out(self) -> CallOutcome:
        self.timeouts += 1
        return CallOutcome(failure=f"no answer within {self.timeout_s:g} s")

    def _check_abandoned(self, name: str) -> None:
        # An async call that ignores its cancellation keeps no thread, so more of them are allowed.
        calls, loops = self.abandoned, self._loop.stuck
        threads = calls - self._loop.abandoned + loops
        if threads > self.max_abandoned or calls > MAX_AT_ONCE:
            raise RewardError(
                f"{calls} calls of the reward function {name} still run past their "
                f"deadline of {self.timeout_s:g} s and cannot be stopped: give the function its "
                "own time limit, or raise reward_model.timeout_s"
            )

    async def _run_async(self, call: Callable[[], Any]) -> CallOutcome:
        outcome: CallOutcome | None = await self._loop.run(call, self.timeout_s, outcome_of)
        return self._timed_out() if outcome is None else outcome

    async def _run_in_thread(
        self, function: Callable[[], CallOutcome], timeout_s: float
    ) -> CallOutcome:
        clock = ThreadClock()

        def timed() -> CallOutcome:
            CALL_TIMEOUT_S.set(timeout_s)
            clock.begin()
            return function()

        call = self._threads.submit(timed)
        self._clocks[id(clock)] = clock
        try:
            await arrival(call, timeout_s)
        finally:
            del self._clocks[id(clock)]
            if not call.done():
                self._abandoned.append(call)
        return call.result() if call.done() else self._timed_out()
