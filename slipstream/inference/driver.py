"""`AsyncEngine` implements the asynchronous engine protocol with a synchronous `EngineCore`.

    generate() ---- add ----> core            One of the waiting calls is the leader. It passes new
        |                       |             requests to the core, runs its steps on the compute
        +<-- Generation --------+             thread, and passes each finished generation to the
                                              call that waits for it. When its own generation is
                                              done, another call leads.

There is no background task, so nothing has to be started and nothing can leak. All work on the core
runs on one thread, never on the event loop. The thread belongs to the engine or is shared with a
trainer. A cancelled call still waits until the current step ends, because that step may finish the
generations of other calls.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import anyio

from slipstream.errors import EngineError, RequestError
from slipstream.inference.protocol import EngineStats, check_update
from slipstream.models.hf_io import read_tensors
from slipstream.threads import arrival
from slipstream.types import (
    EngineCapabilities,
    GenerateRequest,
    Generation,
    PolicyVersion,
    StopReason,
    WeightUpdate,
)

T = TypeVar("T")

_log = logging.getLogger(__name__)

_IDLE_CYCLES = 4
"""Cycles of the event loop without a new request, after which the next step begins. A turn whose
tool needs no thread is answered within these."""


class EngineCore(Protocol):
    """The synchronous part of an engine. All methods but `interrupt` and `stats` are called on the
    compute thread."""

    def add(self, request: GenerateRequest) -> None:
        """Queue a request. Raises RequestError if it can never be served."""
        ...

    def step(self) -> list[Generation]:
        """Do a small amount of work and return the generations that ended."""
        ...

    def has_work(self) -> bool:
        """Whether any request has not ended yet, or has ended but was not returned yet."""
        ...

    def interrupt(self, requested: bool) -> None:
        """Ask a running step to end soon, or withdraw that. The requests of the step are kept.
        Called from another thread."""
        ...

    def abort(self, request_ids: Sequence[str] | None) -> list[Generation]:
        """Stop requests (all if None) and return their partial generations."""
        ...

    def update_weights(self, update: WeightUpdate) -> None:
        """Load new policy weights. Raises EngineError if they do not fit."""
        ...

    def stats(self) -> EngineStats:
        """Return the counters so far. Called from any thread."""
        ...


@dataclass(slots=True)
class _Ticket:
    """A `generate` call that waits. `event` is set when its result or error is there, or when it
    has become the leader."""

    request: GenerateRequest
    event: asyncio.Event = field(default_factory=asyncio.Event)
    result: Generation | None = None
    error: Exception | None = None
    submitted: bool = False
    """Whether the request has been passed to the core, or is being passed to it."""

    @property
    def waits(self) -> bool:
        """Whether the call has neither a result nor an error."""
        return self.result is None and self.error is None


class AsyncEngine:
    """An `InferenceEngine` that runs an `EngineCore` on its compute thread."""

    def __init__(
        self,
        core: EngineCore,
        *,
        name: str,
        capabilities: EngineCapabilities,
        executor: ThreadPoolExecutor | None = None,
        slice_seconds: float = 0.1,
    ) -> None:
        """`executor` must have one thread and may be shared; without it the engine makes its own.
        `slice_seconds` is the time after which a series of steps returns to the event loop."""
        self.core = core
        self._name = name
        self._capabilities = capabilities
        self._slice = slice_seconds
        self._thread = executor or ThreadPoolExecutor(1, thread_name_prefix=f"engine-{name}")
        self._owns_thread = executor is None
        self._submitted: set[Future[Any]] = set()
        self._lock = anyio.Lock()
        self._tickets: dict[str, _Ticket] = {}
        self._leader: str | None = None
        self._paused = False
        self._interrupts = 0
        self._arrived = 0
        """The number of `generate` calls so far."""
        self._closed = False

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._capabilities

    async def generate(self, request: GenerateRequest) -> Generation:
        name = request.request_id
        if name in self._tickets:
            raise RequestError(
                f"request {name!r}: a request with this request_id is already running"
            )
        ticket = self._tickets[name] = _Ticket(request)
        self._arrived += 1
        try:
            if self._paused:
                async with self._lock:
                    added = self._not_submitted()
                    await self._call(lambda: self._add(added))
                    _wake_refused(added)
            if self._leader is None:
                self._leader = name
            while ticket.waits:
                if self._leader == name and not self._paused:
                    await self._advance()
                else:
                    await ticket.event.wait()
                    ticket.event = asyncio.Event()
            if ticket.error is not None:
                raise ticket.error
            assert ticket.result is not None
            return ticket.result
        finally:
            await self._withdraw(name, ticket)

    async def abort(self, request_ids: Sequence[str] | None = None) -> list[Generation]:
        chosen = None if request_ids is None else set(request_ids)
        # The core does not know the requests of calls that still wait to add theirs.
        not_submitted = [
            _empty(name, StopReason.ABORT)
            for name, ticket in self._tickets.items()
            if not ticket.submitted and ticket.waits and (chosen is None or name in chosen)
        ]
        self._deliver(not_submitted)
        async with self._between_steps():
            partial = await self._call(lambda: self.core.abort(request_ids))
            self._deliver(partial)
        return not_submitted + partial

    async def pause(self) -> None:
        self._paused = True
        async with self._between_steps():
            pass

    async def resume(self) -> None:
        self._paused = False
        self._wake_leader()

    async def update_weights(self, update: WeightUpdate) -> None:
        check_update(update, self._name, self._capabilities)
        async with self._between_steps():
            await self._call(lambda: self.core.update_weights(update))

    async def update_drafter(self, update: WeightUpdate) -> None:
        raise EngineError(f"engine {self._name} has no draft head to update to {update.version}")

    async def update_weights_from_checkpoint(
        self, path: Path, version: PolicyVersion | None = None
    ) -> None:
        tensors = await self._call(lambda: read_tensors(path))
        if version is None:
            version = self.stats().version + 1
        await self.update_weights(WeightUpdate(version=version, buckets=[list(tensors.items())]))

    def stats(self) -> EngineStats:
        return self.core.stats()

    def lend_to(self, lent: Callable[[bool], None]) -> None:
        """Does nothing: this engine never frees cores."""

    def close(self) -> None:
        """Drop all requests, and end the compute thread if the engine made it.

        Waits until the current step ends. Calls that still wait, and later calls, raise
        EngineError.
        """
        self._closed = True
        self.core.interrupt(True)
        submitted = list(self._submitted)
        for future in submitted:
            future.cancel()
        wait([future for future in submitted if not future.cancelled()])
        if self._owns_thread:
            self._thread.shutdown(wait=True)
        self._wake_leader()

    async def _advance(self) -> None:
        """Run steps until a request ends or the time slice is over."""
        async with self._lock:
            await self._gather()
            if self._paused:
                return
            added = self._not_submitted()
            active = [n for n, t in self._tickets.items() if t.submitted and t.waits]
            future = self._submit(lambda: self._run_slice(active, added))
            try:
                await arrival(future)
            except anyio.get_cancelled_exc_class():
                self._interrupt(+1)
                await _wait_shielded(future)
                self._interrupt(-1)
                raise
            finally:
                if not future.cancelled():
                    self._deliver(future.result())
                    _wake_refused(added)

    async def _gather(self) -> None:
        """Let tasks that can continue now do so. Episodes whose turns have just ended add their
        next turns, and all of these join the next step together."""
        idle = 0
        while idle < _IDLE_CYCLES:
            before = self._arrived
            await asyncio.sleep(0)
            idle = idle + 1 if self._arrived == before else 0

    def _not_submitted(self) -> list[_Ticket]:
        """The waiting calls whose requests the core does not have, in the order of arrival. They
        count as submitted from now on."""
        found = [
            ticket for ticket in self._tickets.values() if not ticket.submitted and ticket.waits
        ]
        for ticket in found:
            ticket.submitted = True
        return found

    def _add(self, tickets: Sequence[_Ticket]) -> bool:
        """Pass requests to the core, on the compute thread. Returns whether it took them all; calls
        whose requests it refused get the error."""
        for ticket in tickets:
            try:
                self.core.add(ticket.request)
            except Exception as error:
                ticket.error = error
        return all(ticket.error is None for ticket in tickets)

    def _run_slice(self, active: Sequence[str], added: Sequence[_Ticket]) -> list[Generation]:
        """Pass requests to the core, and run steps for one time slice, on the compute thread.

        If a step fails, all `active` requests end with the error. Otherwise their calls would wait
        forever.
        """
        end = time.monotonic() + self._slice
        ended: list[Generation] = []
        if not self._add(added):
            return []
        try:
            # A call that waits for the core must not end the slice early. Progress would then
            # depend on thread scheduling, and a run with over-sampling could not be repeated.
            while not ended and self.core.has_work() and time.monotonic() < end:
                ended = self.core.step()
            if not ended and not self.core.has_work():
                # Earlier results were delivered before this slice began, so the core has no
                # result for the active requests.
                return [_empty(n, StopReason.ERROR, "the engine lost the request") for n in active]
        except Exception as error:
            _log.exception("engine %s failed in a step", self._name)
            return self._fail_all(active, f"engine {self._name}: {type(error).__name__}: {error}")
        return ended

    def _fail_all(self, active: Sequence[str], reason: str) -> list[Generation]:
        """End all `active` requests with the error `reason`. Tokens sampled so far are kept."""
        done: list[Generation] = []
        try:
            ended = self.core.abort(None)
            if self.core.has_work():
                done = self.core.step()  # Returns requests that ended before the step failed.
        except Exception:
            _log.exception("engine %s failed to abort its requests after a failed step", self._name)
            ended = []
        found = {generation.request_id for generation in [*ended, *done]}
        ended += [_empty(name, StopReason.ERROR) for name in active if name not in found]
        for generation in ended:
            generation.stop_reason, generation.error = StopReason.ERROR, reason
        return ended + done

    def _deliver(self, generations: Sequence[Generation]) -> None:
        """Wake the calls that wait for these generations."""
        for generation in generations:
            ticket = self._tickets.get(generation.request_id)
            if ticket is not None and ticket.waits:
                ticket.result = generation
                ticket.event.set()

    async def _withdraw(self, name: str, ticket: _Ticket) -> None:
        """Remove a call that returns: abort its request if it has not ended, and if the call was
        the leader, make another call the leader."""
        try:
            if ticket.submitted and ticket.waits and not self._closed:
                with anyio.CancelScope(shield=True):
                    async with self._between_steps():
                        await self._call(lambda: self.core.abort([name]))
        finally:
            del self._tickets[name]
            if self._leader == name:
                self._leader = next(iter(self._tickets), None)
                self._wake_leader()

    def _wake_leader(self) -> None:
        if self._leader is not None:
            self._tickets[self._leader].event.set()

    @asynccontextmanager
    async def _between_steps(self) -> AsyncIterator[None]:
        """Hold the lock of the core. The current step is asked to end soon."""
        self._interrupt(+1)
        try:
            await self._lock.acquire()
        finally:
            self._interrupt(-1)
        try:
            yield
        finally:
            self._lock.release()

    def _interrupt(self, change: int) -> None:
        self._interrupts += change
        self.core.interrupt(self._interrupts > 0)

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        if self._closed:
            raise EngineError(f"engine {self._name} is closed")
        future = self._thread.submit(work)
        self._submitted.add(future)
        future.add_done_callback(self._submitted.discard)
        return future

    async def _call(self, work: Callable[[], T]) -> T:
        """Run `work` on the compute thread and return its result."""
        future = self._submit(work)
        await _wait_shielded(future)
        if future.cancelled():
            raise EngineError(f"engine {self._name} is closed")
        return future.result()


def _wake_refused(tickets: Sequence[_Ticket]) -> None:
    for ticket in tickets:
        if ticket.error is not None:
            ticket.event.set()


def _empty(name: str, reason: StopReason, error: str | None = None) -> Generation:
    """A generation without tokens."""
    return Generation(
        request_id=name,
        token_ids=[],
        log_probs=[],
        sampling_log_probs=[],
        spans=[],
        stop_reason=reason,
        error=error,
    )


async def _wait_shielded(future: Future[Any]) -> None:
    """Wait for `future` even if this task is cancelled: its work cannot be stopped midway."""
    with anyio.CancelScope(shield=True):
        await arrival(future)
