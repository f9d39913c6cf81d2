"""Runs a user's function with a deadline, so that it can neither hang nor crash the run.

A synchronous function runs in a daemon thread: Python cannot stop a thread, so one that never
returns is abandoned; as a daemon it does not keep the interpreter from exiting. An async function
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
from slipstream.threads import DaemonThreads, arrival


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """What a call came to: a value, or the reason why there is none."""

    value: Any = None
    failure: str | None = None


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling `function` gives an awaitable; also for objects with `async __call__`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - the method itself, not callability
    )


class DeadlineRunner:
    """Calls functions with a deadline, `num_workers` at once (None: as `Slots` finds out);
    `max_abandoned` hung calls may be left at once."""

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
        """Calls past their deadline that still run, each in a thread."""
        self._abandoned = [call for call in self._abandoned if not call.done()]
        return len(self._abandoned)

    async def run(
        self, function: Callable[[], Any], *, name: str, asynchronous: bool
    ) -> CallOutcome:
        """Call `function()`. Never raises what it raises, except `RewardError`.

        Raises `RewardError` naming the function when too many of its calls hang.
        """
        async with self.slot(waits=asynchronous):
            if asynchronous:
                return await self._run_async(function)
            return await self._run_in_thread(function, name)

    def slot(self, *, waits: bool = False) -> AbstractAsyncContextManager[None]:
        """To be held during a call; `waits`: one that is known to compute nothing here."""
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
            except (Exception, SystemExit) as error:  # supervisor: keeps the reason
                return CallOutcome(failure=failure_of(error))
        return self._timed_out()

    async def _run_in_thread(self, function: Callable[[], Any], name: str) -> CallOutcome:
        if self.abandoned > self.max_abandoned:
            raise RewardError(
                f"{self.abandoned} calls of the reward function {name} hang past their deadline of "
                f"{self.timeout_s:g} s and cannot be stopped: give it a time limit of its own, or "
                "raise reward_model.timeout_s"
            )
        clock = ThreadClock()

        def timed() -> Any:
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
        if error is not None:  # supervisor: SystemExit, too, keeps the reason
            return CallOutcome(failure=failure_of(error))
        return CallOutcome(value=call.result())


def failure_of(error: BaseException) -> str:
    """What an error says, in one line."""
    try:
        text = str(error)
    except Exception:  # it is a user's class
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
