"""From a synchronous core to the asynchronous protocol.

    generate() ---- add ----> core            one of the waiting calls leads: it runs the core's
        |                       |             steps on the compute thread and hands each finished
        +<-- Generation --------+             generation to the call that waits for it; when its
                                              own is done it hands the lead to another call.

Nothing runs in the background, so there is nothing to start or to leak. All work on the core is
done on one thread, its own or one that it shares with a trainer, never on the event loop. Work once
begun is waited for even by a call that is cancelled: what it finished belongs to other calls.
"""

from __future__ import annotations

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
from slipstream.inference.protocol import EngineStats
from slipstream.models.hf_io import read_tensors
from slipstream.threads import arrival
from slipstream.types import (
    EngineCapabilities,
    GenerateRequest,
    Generation,
    PolicyVersion,
    StopReason,
    UpdateKind,
    WeightUpdate,
)

T = TypeVar("T")

_log = logging.getLogger(__name__)


class EngineCore(Protocol):
    """What an engine does on its compute thread."""

    def add(self, request: GenerateRequest) -> None: ...

    def step(self) -> list[Generation]:
        """Some work; returns the requests that ended."""
        ...

    def has_work(self) -> bool: ...

    def interrupt(self, wanted: bool) -> None:
        """Called from another thread: while `wanted`, a step shall end soon, requests kept."""
        ...

    def abort(self, request_ids: Sequence[str] | None) -> list[Generation]: ...

    def update_weights(self, update: WeightUpdate) -> None: ...

    def stats(self) -> EngineStats: ...


@dataclass(slots=True)
class _Ticket:
    """A `generate` call: woken when it is done or when it shall lead.

    `known`: the core has been, or is being, given the request.
    """

    event: anyio.Event = field(default_factory=anyio.Event)
    result: Generation | None = None
    known: bool = False


class AsyncEngine:
    """`InferenceEngine` over an `EngineCore`."""

    def __init__(
        self,
        core: EngineCore,
        *,
        name: str,
        capabilities: EngineCapabilities,
        executor: ThreadPoolExecutor | None = None,
        slice_seconds: float = 0.1,
    ) -> None:
        """`executor` has one thread and may be shared; without one the engine makes its own.
        `slice_seconds` bounds how long steps run before the event loop is asked for news."""
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
        self._closed = False

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._capabilities

    async def generate(self, request: GenerateRequest) -> Generation:
        name = request.request_id
        if name in self._tickets:
            raise RequestError(f"request {name!r}: a request of this id is already running")
        ticket = self._tickets[name] = _Ticket()
        try:
            async with self._lock:
                if ticket.result is None:
                    ticket.known = True
                    await self._call(lambda: self.core.add(request))
            if self._leader is None:
                self._leader = name
            while ticket.result is None:
                if self._leader == name and not self._paused:
                    await self._advance()
                else:
                    await ticket.event.wait()
                    ticket.event = anyio.Event()
            return ticket.result
        finally:
            await self._leave(name, ticket)

    async def abort(self, request_ids: Sequence[str] | None = None) -> list[Generation]:
        wanted = None if request_ids is None else set(request_ids)
        # Calls that still wait for their turn to be added are requests, too.
        early = [
            _empty(name, StopReason.ABORT)
            for name, ticket in self._tickets.items()
            if not ticket.known and ticket.result is None and (wanted is None or name in wanted)
        ]
        self._deliver(early)
        async with self._between_steps():
            partial = await self._call(lambda: self.core.abort(request_ids))
            self._deliver(partial)
        return early + partial

    async def pause(self) -> None:
        self._paused = True
        async with self._between_steps():
            pass

    async def resume(self) -> None:
        self._paused = False
        self._wake_leader()

    async def update_weights(self, update: WeightUpdate) -> None:
        if update.kind is not UpdateKind.FULL:
            raise EngineError(f"engine {self._name} takes full weights, got {update.kind.value}")
        if update.transport not in self._capabilities.transports:
            known = ", ".join(sorted(self._capabilities.transports))
            raise EngineError(
                f"engine {self._name} takes weights by {known}, got {update.transport.value}"
            )
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
        """This engine lends no cores."""

    def close(self) -> None:
        """Give up all work, and end the thread if it is the engine's own.

        Waits for the work under way. Calls that still wait, and later ones, raise EngineError.
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
        """Run steps until something ended or the time slice is over."""
        async with self._lock:
            if self._paused:
                return
            known = [n for n, t in self._tickets.items() if t.known and t.result is None]
            future = self._submit(lambda: self._run_slice(known))
            try:
                await arrival(future)
            except anyio.get_cancelled_exc_class():
                self._interrupt(+1)
                await _finish(future)
                self._interrupt(-1)
                raise
            finally:
                if not future.cancelled():
                    self._deliver(future.result())

    def _run_slice(self, known: Sequence[str]) -> list[Generation]:
        """On the compute thread. A failure is every request's result, never lost: none may wait for
        a step that will not come."""
        end = time.monotonic() + self._slice
        ended: list[Generation] = []
        try:
            # Not ended by who waits for the core: how far the others get must not depend on when a
            # thread was scheduled, or a run with over-sampling could not be repeated.
            while not ended and self.core.has_work() and time.monotonic() < end:
                ended = self.core.step()
            if not ended and not self.core.has_work():
                # Results are delivered before the next slice begins: who waits now waits in vain.
                return [_empty(n, StopReason.ERROR, "the engine lost the request") for n in known]
        except Exception as error:
            _log.exception("engine %s failed in a step", self._name)
            return self._failed(known, f"engine {self._name}: {type(error).__name__}: {error}")
        return ended

    def _failed(self, known: Sequence[str], reason: str) -> list[Generation]:
        """End every request with `reason`; tokens sampled so far are kept where there are any."""
        done: list[Generation] = []
        try:
            ended = self.core.abort(None)
            if self.core.has_work():
                done = self.core.step()  # what had ended before the step failed
        except Exception:
            _log.exception("engine %s failed to give up its requests", self._name)
            ended = []
        found = {generation.request_id for generation in [*ended, *done]}
        ended += [_empty(name, StopReason.ERROR) for name in known if name not in found]
        for generation in ended:
            generation.stop_reason, generation.error = StopReason.ERROR, reason
        return ended + done

    def _deliver(self, generations: Sequence[Generation]) -> None:
        for generation in generations:
            ticket = self._tickets.get(generation.request_id)
            if ticket is not None and ticket.result is None:
                ticket.result = generation
                ticket.event.set()

    async def _leave(self, name: str, ticket: _Ticket) -> None:
        """Withdraw a call: its request, if it has not ended, and its lead."""
        try:
            if ticket.known and ticket.result is None and not self._closed:
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
        """Hold the core; a step under way is asked to end soon."""
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
        future = self._submit(work)
        await _finish(future)
        if future.cancelled():
            raise EngineError(f"engine {self._name} is closed")
        return future.result()


def _empty(name: str, reason: StopReason, error: str | None = None) -> Generation:
    return Generation(
        request_id=name,
        token_ids=[],
        log_probs=[],
        sampling_log_probs=[],
        spans=[],
        stop_reason=reason,
        error=error,
    )


async def _finish(future: Future[Any]) -> None:
    """Wait, even when cancelled: the compute thread cannot be stopped in the middle of its work."""
    with anyio.CancelScope(shield=True):
        await arrival(future)
