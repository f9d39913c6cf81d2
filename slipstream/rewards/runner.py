"""Calls a user's function with a deadline, so that it can neither hang nor crash the run.

A synchronous function runs in a daemon thread. Python cannot stop a thread, so a call that never
returns is abandoned; daemon threads do not block the exit of the interpreter. An async function
runs on the event loop and is cancelled at the deadline. Called by the reward managers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import anyio

from slipstream.errors import ConfigError, RewardError
from slipstream.rewards.slots import Slots, ThreadClock
from slipstream.rewards.workers import CALL_TIMEOUT_S
from slipstream.threads import DaemonThreads, arrival


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """The result of a call: a value, or the reason of its failure."""

    value: Any = None
    failure: str | None = None


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether `function` is async, or an object with an async `__call__`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - the method itself, not callability
    )


class DeadlineRunner:
    """Calls functions with a deadline.

    `num_workers` is the number of concurrent calls (None: decided by `Slots`). `max_abandoned` is
    how many hung calls may exist before `run` raises.
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

    @property
    def abandoned(self) -> int:
        """Number of calls that exceeded their deadline and still run, each in a thread."""
        self._abandoned = [call for call in self._abandoned if not call.done()]
        return len(self._abandoned)

    async def run(
        self, function: Callable[[], Any], *, name: str, asynchronous: bool
    ) -> CallOutcome:
        """Call `function()` and return its outcome. Its exceptions become failures.

        Raises RewardError if `function` does, or if too many of its calls hang; the error then
        names it.
        """
        async with self.slot(waits=asynchronous):
            if asynchronous:
                return await self._run_async(function)
            return await self._run_in_thread(function, name)

    def slot(self, *, waits: bool = False) -> AbstractAsyncContextManager[None]:
        """Return a context to hold during a call. `waits`: the call needs no CPU time here."""
        return self._slots.one(waits=waits)

    def _computed(self) -> dict[int, float | None]:
        return {name: clock.seconds() for name, clock in self._clocks.items()}

    def _timed_out(self) -> CallOutcome:
        self.timeouts += 1
        return CallOutcome(failure=f"no answer within {self.timeout_s:g} s")

    async def _run_async(self, function: Callable[[], Any]) -> CallOutcome:
        with anyio.move_on_after(self.timeout_s):
            try:
                return CallOutcome(value=await function())
            except RewardError:
                raise
            except (Exception, SystemExit) as error:  # user code may raise anything
                return CallOutcome(failure=failure_of(error))
        return self._timed_out()

    async def _run_in_thread(self, function: Callable[[], Any], name: str) -> CallOutcome:
        if self.abandoned > self.max_abandoned:
            raise RewardError(
                f"{self.abandoned} calls of the reward function {name} still run past their "
                f"deadline of {self.timeout_s:g} s and cannot be stopped: give the function its "
                "own time limit, or raise reward_model.timeout_s"
            )
        clock = ThreadClock()

        def timed() -> Any:
            CALL_TIMEOUT_S.set(self.timeout_s)
            clock.begin()
            return function()

        call = self._threads.submit(timed)
        self._clocks[id(clock)] = clock
        try:
            with anyio.move_on_after(self.timeout_s):
                await arrival(call)
        finally:
            del self._clocks[id(clock)]
            if not call.done():
                self._abandoned.append(call)
        if not call.done():
            return self._timed_out()
        error = call.exception()
        if isinstance(error, RewardError):
            raise error
        if error is not None:  # also SystemExit
            return CallOutcome(failure=failure_of(error))
        return CallOutcome(value=call.result())


def failure_of(error: BaseException) -> str:
    """Return type and message of an error in one line."""
    try:
        text = str(error)
    except Exception:  # a user's exception class may have a broken __str__
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
