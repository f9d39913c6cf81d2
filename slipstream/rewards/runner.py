"""Runs a user's function with a deadline, so that it can neither hang nor crash the run.

A synchronous function runs in a daemon thread of its own: Python cannot stop a thread, so one that
never returns is abandoned; as a daemon it does not keep the interpreter from exiting. An async
function runs on the event loop and is cancelled at the deadline. Called by the reward managers.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel

from slipstream.errors import ConfigError, RewardError


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call came to: a value, or the reason why there is none."""

    value: Any = None
    failure: str | None = None


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling `function` gives an awaitable; also for objects with `async __call__`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - the method itself, not callability
    )


class DeadlineRunner:
    """Calls functions with a deadline; `max_abandoned` hung threads may live at once."""

    def __init__(self, *, timeout_s: float, num_workers: int, max_abandoned: int = 8) -> None:
        if not 0.0 < timeout_s < float("inf"):
            raise ConfigError(
                f"reward_model.timeout_s {timeout_s} must be a positive number of seconds"
            )
        if num_workers < 1:
            raise ConfigError(f"reward_model.num_workers {num_workers} must be at least 1")
        self.timeout_s = timeout_s
        self.max_abandoned = max_abandoned
        self.timeouts = 0
        self._num_workers = num_workers
        self._slots: anyio.CapacityLimiter | None = None
        self._loop: anyio.lowlevel.EventLoopToken | None = None
        self._abandoned: list[threading.Thread] = []

    @property
    def abandoned(self) -> int:
        """Threads past their deadline that still run."""
        self._abandoned = [t for t in self._abandoned if t.is_alive()]
        return len(self._abandoned)

    async def run(self, function: Callable[[], Any], *, name: str, asynchronous: bool) -> Outcome:
        """Call `function()`. Never raises what it raises, except `RewardError`.

        Raises `RewardError` naming the function when too many of its calls hang.
        """
        async with self._limiter():
            if asynchronous:
                return await self._run_async(function)
            return await self._run_in_thread(function, name)

    def _limiter(self) -> anyio.CapacityLimiter:
        # A limiter belongs to one event loop; a runner may outlive it.
        loop = anyio.lowlevel.current_token()
        if self._slots is None or self._loop != loop:
            self._slots, self._loop = anyio.CapacityLimiter(self._num_workers), loop
        return self._slots

    def _timed_out(self) -> Outcome:
        self.timeouts += 1
        return Outcome(failure=f"no answer within {self.timeout_s:g} s")

    async def _run_async(self, function: Callable[[], Any]) -> Outcome:
        with anyio.move_on_after(self.timeout_s):
            try:
                return Outcome(value=await function())
            except RewardError:
                raise
            except (Exception, SystemExit) as error:  # supervisor: keeps the reason
                return Outcome(failure=_reason(error))
        return self._timed_out()

    async def _run_in_thread(self, function: Callable[[], Any], name: str) -> Outcome:
        if self.abandoned > self.max_abandoned:
            raise RewardError(
                f"{self.abandoned} calls of the reward function {name} hang past their deadline of "
                f"{self.timeout_s:g} s and cannot be stopped: give it a time limit of its own, or "
                "raise reward_model.timeout_s"
            )
        answered = anyio.Event()
        token = anyio.lowlevel.current_token()
        box: list[Outcome | RewardError] = []

        def work() -> None:
            try:
                box.append(Outcome(value=function()))
            except RewardError as error:
                box.append(error)
            except BaseException as error:  # supervisor: SystemExit must not end the thread mutely
                box.append(Outcome(failure=_reason(error)))
            try:
                anyio.from_thread.run_sync(answered.set, token=token)
            except RuntimeError:
                return  # the event loop ended first: nobody waits for the answer any more

        thread = threading.Thread(target=work, name=f"reward-{name}", daemon=True)
        thread.start()
        try:
            with anyio.move_on_after(self.timeout_s):
                await answered.wait()
        finally:
            if not box:
                self._abandoned.append(thread)
        if not box:
            return self._timed_out()
        if isinstance(box[0], RewardError):
            raise box[0]
        return box[0]


def _reason(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
