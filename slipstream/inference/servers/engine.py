"""`ServedEngine`: an inference engine whose computation runs in servers.

    generate() --> least busy server --HTTP--> ids, log-probs, version spans
    update_weights() --> transport --> every server: pause, load, new version, resume

A server that ends is started again with the newest weights, and its requests are begun again. The
same happens to a server that hangs, or whose weights are not known after a failed update.
Servers draw their own noise. Each request has a seed that depends on its noise key, so noise is not
shared between requests, but tokens can depend on the batch.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio

from slipstream.errors import EngineError, RequestError
from slipstream.inference.engine.request import Decode, Running
from slipstream.inference.protocol import EngineStats, check_request, check_update
from slipstream.inference.servers.check import Finding, Verdict, WeightCheck
from slipstream.inference.servers.drafts import ServedDrafts
from slipstream.inference.servers.http import ServerGoneError, ServerStallsError
from slipstream.inference.servers.protocol import Answer, Server
from slipstream.inference.servers.transfer import WeightTransfer
from slipstream.models.hf_io import read_tensors
from slipstream.sampling.noise import key_words
from slipstream.threads import arrival
from slipstream.types import (
    EngineCapabilities,
    GenerateRequest,
    Generation,
    KVPolicy,
    PolicyVersion,
    StopReason,
    VersionSpan,
    WeightUpdate,
)

T = TypeVar("T")
N = TypeVar("N", int, float)

log = logging.getLogger(__name__)

TRIES = 4
"""How often a request is sent, if servers end while they serve it."""

AGAIN_S = 0.5
"""Seconds before a request is sent again to a server that is there, but gave no answer."""

ABORT_AGAIN_S = 0.2
"""Seconds after which an abort is repeated. The server may get it before the request."""

ABORT_S = 60.0
"""Time limit of an abort in seconds."""

RELEASE_S = 10.0
"""Time limit in seconds to resume a server whose update ended early."""


@dataclass(slots=True, eq=False)
class _Call:
    """A `generate` call that runs. `server` and `wire_id` are set while a server has its
    request. `abort` is set when the call shall end."""

    server: _Replica | None = None
    wire_id: str = ""
    abort: anyio.Event = field(default_factory=anyio.Event)
    ended: anyio.Event = field(default_factory=anyio.Event)
    result: Generation | None = None


@dataclass(slots=True, eq=False)
class _Replica:
    """A server, its key in the weight check, and its load in tokens. `starts` counts how often it
    was started. `written` is the number of the weights that it has."""

    server: Server
    key: str
    written: int
    load: int = 0
    starts: int = 0
    lost: str | None = None
    """Why the server cannot be used any more."""
    start: asyncio.Task[None] | None = None
    """The start that runs. It is a task of its own, because several calls can wait for it, and
    each of them can be cancelled."""

    @property
    def starting(self) -> bool:
        return self.start is not None and not self.start.done()


class _Clock:
    """Seconds of consecutive parts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, part: str) -> None:
        """The part has ended, and the next one begins."""
        now = time.perf_counter()
        self.seconds[part], self._last = now - self._last, now


class ServedEngine:
    """An `InferenceEngine` over the servers of one policy."""

    def __init__(
        self,
        servers: Sequence[Server],
        weights: WeightTransfer,
        *,
        name: str,
        capabilities: EngineCapabilities,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Sequence[int] = (),
        decode: Decode | None = None,
        temperatures: tuple[float, float] = (0.0, math.inf),
        check: WeightCheck | None = None,
        on_compute: Executor | None = None,
        drafts: ServedDrafts | None = None,
        stall_s: float = math.inf,
    ) -> None:
        """The servers have the weights in `weights`, as version 0. With `drafts`, they were started
        with its draft head.

        `check` compares the servers' log-probs with the trainer's at the start and after each
        update. It computes on `on_compute`. A server that has requests and computes no token for
        `stall_s` seconds is started again.
        """
        self._replicas = [_Replica(s, str(number), 0) for number, s in enumerate(servers)]
        self._weights = weights
        self._name = name
        self._capabilities = capabilities
        self._vocab_size, self._max_model_len = vocab_size, max_model_len
        self._eos = frozenset(eos_token_ids)
        self._decode = decode
        self._temperatures = temperatures
        self._check_weights, self._on_compute = check, on_compute
        self._drafts = drafts
        self._stall_s = stall_s
        self._unchecked = check is not None
        self._calls: dict[str, _Call] = {}
        self._groups: dict[str, _Replica] = {}
        self._wire_ids = itertools.count()
        self._updating = anyio.Lock()
        self._paused = False
        self._open = anyio.Event()
        self._open.set()
        self._prepared = False
        self._closed = False
        self._written = 0
        self._salt_prefix = uuid.uuid4().hex[:12]
        self._stats = EngineStats()
        self._findings: dict[str, Finding] = {}
        """The last comparison of each server."""
        self.update_seconds: Mapping[str, float] = {}
        """Seconds of the parts of the last weight update: `write` (to memory), `install` (pause,
        load and resume, all servers at once), `score` (the trainer's log-probs for the check), and
        `check` (the servers')."""

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._capabilities

    async def generate(self, request: GenerateRequest) -> Generation:
        name = request.request_id
        self._check_open()
        if name in self._calls:
            raise RequestError(
                f"request {name!r}: a request with this request_id is already running"
            )
        self._check(request)
        call = self._calls[name] = _Call()
        try:
            result = call.result = await self._serve(request, call)
            return result
        finally:
            del self._calls[name]
            call.ended.set()
            self._count(request, call.result)

    async def abort(self, request_ids: Sequence[str] | None = None) -> list[Generation]:
        chosen = [
            call for name, call in self._calls.items() if request_ids is None or name in request_ids
        ]
        for call in chosen:
            call.abort.set()
        with anyio.move_on_after(ABORT_S) as scope:
            for call in chosen:
                while not call.ended.is_set():
                    await self._abort(chosen)
                    with anyio.move_on_after(ABORT_AGAIN_S):
                        await call.ended.wait()
        if scope.cancelled_caught:
            raise EngineError(f"engine {self._name}: a server did not abort in {ABORT_S:g} s")
        results = [call.result for call in chosen]
        return [r for r in results if r is not None and r.stop_reason is StopReason.ABORT]

    async def pause(self) -> None:
        self._check_open()
        self._paused = True
        self._shut()
        async with self._updating:
            await self._prepare()
            await self._each(lambda replica: replica.server.pause())

    async def resume(self) -> None:
        self._paused = False
        try:
            async with self._updating:
                await self._each(lambda replica: replica.server.resume())
                await self._verify()
        finally:
            self._wake()

    async def update_weights(self, update: WeightUpdate) -> None:
        self._check_open()
        check_update(update, self._name, self._capabilities)
        async with self._updating:
            await self._prepare()
            # Requests wait until all servers have the new weights: they get prefixes by weights.
            self._shut()
            try:
                clock = _Clock()
                with anyio.CancelScope(shield=True):
                    new = await anyio.to_thread.run_sync(self._weights.prepare, update)
                    # Servers that do not confirm these weights are started again.
                    self._written += 1
                    self._stats = replace(self._stats, version=update.version)
                clock.lap("write")
                await self._each(lambda replica: self._install(replica, update))
                clock.lap("install")
                if (check := self._check_weights) is not None:
                    await self._computed(partial(check.renew, new))
                    self._unchecked = True
                    clock.lap("score")
                if not self._paused:
                    await self._verify()
                    clock.lap("check")
                if self._drafts is not None:
                    await self._each_draft(self._drafts.confirm)
                self.update_seconds = clock.seconds
                seconds = _added(self._stats.update_seconds, clock.seconds)
                self._stats = replace(self._stats, update_seconds=seconds)
            finally:
                self._wake()

    async def update_drafter(self, update: WeightUpdate) -> None:
        self._check_open()
        if self._drafts is None:
            raise EngineError(
                f"engine {self._name} has no draft head to update to {update.version}"
            )
        # A server loads policy and draft head one after the other.
        async with self._updating:
            await self._prepare()
            await self._drafts.update(update, self._each_draft)

    async def update_weights_from_checkpoint(
        self, path: Path, version: PolicyVersion | None = None
    ) -> None:
        tensors = await anyio.to_thread.run_sync(read_tensors, path)
        if version is None:
            version = self._stats.version + 1
        await self.update_weights(WeightUpdate(version=version, buckets=[list(tensors.items())]))

    def stats(self) -> EngineStats:
        running = sum(call.server is not None for call in self._calls.values())
        findings = self._findings.values()
        shares = [f.share for f in findings if not math.isnan(f.share)]
        stats = replace(
            self._stats,
            running=running,
            waiting=len(self._calls) - running,
            server_share=min(shares, default=None),
            server_difference=max((f.difference for f in findings), default=None),
        )
        return stats if self._drafts is None else self._drafts.stats(stats)

    def lend_to(self, lent: Callable[[bool], None]) -> None:
        """Does nothing: servers have their own cores."""

    def close(self) -> None:
        """End the servers that were started for this engine, and remove their weights."""
        self._closed = True
        for replica in self._replicas:
            replica.server.close()
        self._weights.close()
        self._wake()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError(f"engine {self._name} is closed")

    def _check(self, request: GenerateRequest) -> None:
        name = request.request_id
        check_request(request, vocab_size=self._vocab_size, max_model_len=self._max_model_len)
        low, high = self._temperatures
        if request.params.temperature and not low <= request.params.temperature <= high:
            raise RequestError(
                f"request {name!r}: temperature={request.params.temperature:g} must be 0, or from "
                f"{low:g} to {high:g} with the engine {self._name}"
            )
        if request.params.stop and self._decode is None:
            raise RequestError(
                f"request {name!r}: stop strings need an engine with a tokenizer "
                "(its argument `decode`)"
            )
        if request.return_hidden_states:
            raise RequestError(
                f"request {name!r}: the {self._name} engine has no hidden states; set "
                "return_hidden_states=False"
            )
        if self._drafts is not None:
            self._drafts.check_request(request)

    async def _prepare(self) -> None:
        """Name the weights of new servers and check them. Called once, at the first use."""
        if not self._prepared:
            version = self._stats.version
            await self._each(lambda replica: replica.server.set_version(version))
            if self._drafts is not None:
                await self._each_draft(self._drafts.install)
            if not self._paused:
                await self._verify()
            self._prepared = True

    async def _serve(self, request: GenerateRequest, call: _Call) -> Generation:
        """Send a request until a server answers it."""
        problem = ""
        for attempt in range(TRIES):
            replica = await self._ready(request, call)
            if call.abort.is_set():
                return _empty(request, StopReason.ABORT)
            self._check_open()
            if replica is None:
                break
            starts = replica.starts
            try:
                return await self._send(request, call, replica, attempt)
            except ServerGoneError as error:
                problem = str(error)
                if not self._closed:
                    await self._unless_aborted(call, partial(self._lose, replica, starts, error))
            except EngineError as error:
                return _empty(request, StopReason.ERROR, str(error))
        if call.abort.is_set():
            return _empty(request, StopReason.ABORT)
        self._check_open()
        lost = [replica.lost for replica in self._replicas if replica.lost]
        return _empty(request, StopReason.ERROR, f"engine {self._name}: {(lost or [problem])[0]}")

    async def _ready(self, request: GenerateRequest, call: _Call) -> _Replica | None:
        """Wait until a server can take a request, and return it. None if there is none, or if the
        call was aborted.

        The server is chosen last, without a wait between the choice and the return: so requests
        that wait together see each other's load.
        """
        while await self._unless_aborted(call, self._until_open):
            if not self._open.is_set():
                continue  # an update has begun since
            replica = self._choose(request.group)
            if replica is None or self._closed:
                return replica
            if not replica.starting and replica.written == self._written:
                return replica
            await self._unless_aborted(call, partial(self._revive, replica, replica.starts))
        return None

    async def _until_open(self) -> None:
        if not self._prepared:
            async with self._updating:
                await self._prepare()
        while not self._open.is_set():
            await self._open.wait()

    async def _unless_aborted(self, call: _Call, work: Callable[[], Awaitable[None]]) -> bool:
        """Do `work`, but stop when the call is aborted. Returns whether it was done."""
        if call.abort.is_set():
            return False
        failures: list[Exception] = []
        done = False

        async def run() -> None:
            nonlocal done
            try:
                await work()
                done = True
            except Exception as error:
                failures.append(error)
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await call.abort.wait()
            tasks.cancel_scope.cancel()
        if failures:
            raise failures[0]
        return done

    async def _lose(self, replica: _Replica, starts: int, error: ServerGoneError) -> None:
        """A request got no answer from a server. Start it again if it has ended or hangs."""
        stalls = isinstance(error, ServerStallsError)
        if not stalls and replica.starts == starts and await self._alive(replica):
            log.info("%s; the server is there, and the request is sent again", error)
            await anyio.sleep(AGAIN_S)
            return
        await self._revive(replica, starts, str(error))

    async def _alive(self, replica: _Replica) -> bool:
        return not replica.starting and await replica.server.alive()

    async def _send(
        self, request: GenerateRequest, call: _Call, replica: _Replica, attempt: int
    ) -> Generation:
        wire_id = f"{request.request_id}-{next(self._wire_ids)}"
        p = request.params
        ends = () if p.ignore_eos else sorted(self._eos)
        state = Running(
            request=request,
            key=key_words(request.key.parts),
            eos_ids=self._eos,
            context=[*request.prompt_ids, *request.prior_ids],
        )

        def push(new: Answer) -> bool:
            rows = zip(new.token_ids, new.log_probs, new.sampling_log_probs, strict=True)
            for token, log_prob, sampling in rows:
                if state.stop_reason is None:
                    own = 0.0 if p.temperature == 0 else sampling
                    state.push(token, log_prob, own, 0, self._decode)
            return state.stop_reason is not None

        call.server, call.wire_id = replica, wire_id
        tokens = p.max_tokens
        replica.load += tokens
        try:
            answer = await self._unless_stalled(
                replica,
                partial(
                    replica.server.generate,
                    request,
                    wire_id,
                    seed=_seed(request, attempt),
                    stop_token_ids=list(dict.fromkeys([*ends, *p.stop_token_ids])),
                    salt=self._salt,
                    ends=push if p.stop else None,
                ),
            )
        except anyio.get_cancelled_exc_class():
            with anyio.move_on_after(ABORT_S, shield=True):
                await self._abort([call])
            self._stats = replace(self._stats, aborted=self._stats.aborted + 1)
            raise
        finally:
            replica.load -= tokens
            call.server = None
        if self._drafts is not None and answer.drafts is not None:
            await self._drafts.count(replica.server, replica.key, answer.drafts)
        if not p.stop:
            push(answer)
        if answer.aborted and state.stop_reason is None and not call.abort.is_set():
            raise ServerGoneError(
                f"{replica.server.name} stopped request {request.request_id!r}, which this run did "
                "not ask for"
            )
        return self._generation(state, answer, replica)

    async def _unless_stalled(
        self, replica: _Replica, work: Callable[[], Awaitable[Answer]]
    ) -> Answer:
        """Return the result of `work`. Raises ServerStallsError if the server computes no token for
        `stall_s` seconds in which nothing pauses it."""
        if self._stall_s == math.inf:
            return await work()
        results: list[Answer] = []
        failures: list[Exception] = []

        async def run() -> None:
            try:
                results.append(await work())
            except Exception as error:
                failures.append(error)
            tasks.cancel_scope.cancel()

        async def watch() -> None:
            before: tuple[anyio.Event, float] | None = None
            while True:
                await anyio.sleep(self._stall_s)
                if not self._open.is_set():
                    continue
                try:
                    # `_open` is another event after a pause or an update.
                    now = self._open, await replica.server.progress()
                except EngineError as error:
                    failures.append(error)
                    break
                if now == before:
                    failures.append(
                        ServerStallsError(
                            f"{replica.server.name} has computed no token for {self._stall_s:g} s"
                        )
                    )
                    break
                before = now
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            tasks.start_soon(watch)
        if failures:
            raise failures[0]
        return results[0]

    def _generation(self, state: Running, answer: Answer, replica: _Replica) -> Generation:
        """The result of a request. Tokens beyond the end of the response are dropped."""
        if state.stop_reason is None:
            if not answer.aborted:
                raise EngineError(
                    f"{replica.server.name} ended request {state.request_id!r} after "
                    f"{len(state.token_ids)} tokens without a reason"
                )
            state.stop_reason = StopReason.ABORT
        generation = state.generation(self._decode)
        count = len(generation.token_ids)
        generation.spans = [
            VersionSpan(span.version, span.start, min(span.end, count))
            for span in answer.spans
            if span.start < count
        ]
        covered = generation.spans[-1].end if generation.spans else 0
        if covered != count:
            raise EngineError(
                f"{replica.server.name} reports weight versions for {covered} of {count} tokens of "
                f"request {state.request_id!r}"
            )
        return generation

    def _count(self, request: GenerateRequest, result: Generation | None) -> None:
        if result is None:
            return
        s, aborted = self._stats, result.stop_reason is StopReason.ABORT
        tokens = len(result.token_ids)
        self._stats = replace(
            s,
            finished=s.finished + (not aborted),
            aborted=s.aborted + aborted,
            prompt_tokens=s.prompt_tokens + len(request.prompt_ids) + len(request.prior_ids),
            generated_tokens=s.generated_tokens + tokens,
            decode_tokens=s.decode_tokens + max(0, tokens - 1),
        )

    def _choose(self, group: str | None) -> _Replica | None:
        """The server of a request: that of its group, or the one with the least load; None if
        there is none. Servers that start are chosen only if there is no other."""
        usable = [replica for replica in self._replicas if replica.lost is None]
        usable = [replica for replica in usable if not replica.starting] or usable
        if group is not None:
            fellow = self._groups.get(group)
            if fellow is not None and fellow in usable:
                return fellow
        found = min(usable, key=lambda replica: replica.load, default=None)
        if group is not None and found is not None:
            self._groups[group] = found
            while len(self._groups) > 1024:
                del self._groups[next(iter(self._groups))]
        return found

    async def _abort(self, calls: Sequence[_Call]) -> None:
        """Tell the servers to stop what they have of `calls`."""

        async def one(replica: _Replica, ids: Sequence[str]) -> None:
            try:
                await replica.server.abort(ids)
            except EngineError as error:
                log.debug("%s did not abort requests: %s", replica.server.name, error)

        async with anyio.create_task_group() as tasks:
            for replica in self._replicas:
                ids = [call.wire_id for call in calls if call.server is replica]
                if ids:
                    tasks.start_soon(one, replica, ids)

    async def _install(self, replica: _Replica, update: WeightUpdate) -> None:
        """Bring new weights into one server. If that fails, it is started again with them."""
        server, starts = replica.server, replica.starts
        loading = False
        try:
            await server.pause()
            loading = True
            await self._weights.deliver(server)
            loading = False
            if update.kv_policy is KVPolicy.RECOMPUTE:
                await server.forget()
            await server.set_version(update.version)
            if not self._paused:
                await server.resume()
            replica.written = self._written
        except Exception as error:
            await self._revive(replica, starts, str(error), "the server is started again")
            if replica.lost:
                if not loading:
                    await self._release(server)
                raise EngineError(
                    f"weight update to version {update.version} failed: {error}; {replica.lost}"
                ) from error
        except BaseException:
            if not loading:
                await self._release(server)
            raise

    async def _release(self, server: Server) -> None:
        """Resume a server whose update ended early, so that requests of others do not hang."""
        with anyio.move_on_after(RELEASE_S, shield=True):
            try:
                await server.resume()
            except EngineError as error:
                log.debug("%s was not resumed: %s", server.name, error)

    async def _verify(self) -> None:
        """Compare the servers' log-probs with the trainer's. A server that differs is started
        again with the newest weights. Raises EngineError if it still differs."""
        if self._unchecked:
            await self._each(self._verify_one)
            self._unchecked = False

    async def _verify_one(self, replica: _Replica) -> None:
        for last in (False, True):
            finding = await self._compare(replica)
            if finding.verdict in (Verdict.NEW, Verdict.UNDECIDED):
                return
            problem = self._difference(replica, finding)
            if last:
                replica.lost = problem
                raise EngineError(problem)
            await self._revive(replica, replica.starts, problem, "the server is started again")
            if replica.lost:
                replica.lost = f"{problem}; {replica.lost}"
                raise EngineError(replica.lost)

    async def _compare(self, replica: _Replica) -> Finding:
        check, server = self._check_weights, replica.server
        assert check is not None
        question = check.question(replica.key)
        answers = await server.log_probs(question.contexts, question.token_ids, self._salt)
        finding = check.decide(replica.key, question, answers)
        log.info("%s, version %s: %s", server.name, self._stats.version, finding)
        self._findings[replica.key] = finding
        checks = _added(self._stats.server_checks, {finding.verdict.value: 1})
        self._stats = replace(self._stats, server_checks=checks)
        return finding

    @property
    def _salt(self) -> str:
        """What requests must have in common to share prefixes: the engine and the weights. Versions
        do not tell weights apart, because they can repeat."""
        return f"{self._salt_prefix}-{self._written}"

    def _difference(self, replica: _Replica, finding: Finding) -> str:
        if finding.verdict is Verdict.OLD:
            what = (
                "still computes with the weights before the update: its log-probs show "
                f"{finding.share:.0%} (+-{finding.error:.0%}) of the change"
            )
        else:
            what = (
                f"has log-probs that differ from the trainer's by {finding.difference:.2g} nats "
                "(root mean square), more than by rounding; some of its weights, its cache or its "
                "model are not those of the policy, or it has another --dtype or --logprobs-mode"
            )
        return f"{replica.server.name}, policy version {self._stats.version}: it {what}"

    async def _computed(self, work: Callable[[], T]) -> T:
        """Run `work` on the compute thread."""
        assert self._on_compute is not None
        future = self._on_compute.submit(work)
        await arrival(future)
        return future.result()

    async def _revive(
        self,
        replica: _Replica,
        starts: int,
        problem: str = "",
        then: str = "it is started again, and its requests are begun again",
    ) -> None:
        """Start a server again, unless that was done since its start number `starts`. Sets `lost`
        if it fails."""
        await self._started(replica)
        if replica.starts != starts or replica.lost or self._closed:
            return
        if problem:
            log.warning("%s; %s", problem, then)
        # Not ended if this call is cancelled: others can wait for it.
        replica.start = asyncio.create_task(self._start(replica))
        await asyncio.shield(replica.start)

    async def _started(self, replica: _Replica) -> None:
        """Wait for the start of a server, if it starts."""
        if replica.starting:
            assert replica.start is not None
            await asyncio.shield(replica.start)

    async def _start(self, replica: _Replica) -> None:
        written = self._written
        try:
            await anyio.to_thread.run_sync(self._weights.store)
            await replica.server.restart()
            if self._check_weights is not None:
                self._check_weights.forget(replica.key)
            await replica.server.set_version(self._stats.version)
            if self._drafts is not None:
                self._drafts.forget(replica.key)
                await self._drafts.install(replica.server, replica.key)
            if self._paused:
                await replica.server.pause()
            replica.written = written
            replica.starts += 1
        except Exception as error:
            replica.lost = str(error)

    async def _each_draft(self, work: Callable[[Server, str], Awaitable[None]]) -> None:
        """Run `work` with all servers and their keys, as `_each` does."""
        await self._each(lambda replica: work(replica.server, replica.key))

    async def _each(self, work: Callable[[_Replica], Awaitable[None]]) -> None:
        """Run `work` on all servers at once. Raises the first failure after all are done. A server
        that is gone is started again."""
        failures: list[Exception] = []

        async def one(replica: _Replica) -> None:
            await self._started(replica)
            for last in (False, True):
                if replica.lost:
                    return
                starts = replica.starts
                try:
                    await work(replica)
                    return
                except ServerGoneError as error:
                    if last:
                        replica.lost = str(error)
                    else:
                        await self._revive(replica, starts, str(error), "it is started again")
                except Exception as error:
                    failures.append(error)
                    return

        usable = [replica for replica in self._replicas if replica.lost is None]
        async with anyio.create_task_group() as tasks:
            for replica in usable:
                tasks.start_soon(one, replica)
        if failures:
            raise failures[0]
        if all(replica.lost for replica in self._replicas):
            raise EngineError(f"engine {self._name}: {self._replicas[0].lost}")

    def _shut(self) -> None:
        """Let new requests wait. Those that wait already keep their event."""
        if self._open.is_set():
            self._open = anyio.Event()

    def _wake(self) -> None:
        """Let requests continue that wait, unless the engine is paused."""
        if not self._paused or self._closed:
            self._open.set()


def _added(total: Mapping[str, N], new: Mapping[str, N]) -> dict[str, N]:
    """The sums by name."""
    return {**total, **{name: total.get(name, 0) + value for name, value in new.items()}}


def _seed(request: GenerateRequest, attempt: int) -> int:
    """The seed of a request at the server: of its noise key, the number of its prior tokens, and
    the attempts before. 0 to 2^63 - 1."""
    parts = (*request.key.parts, len(request.prior_ids), attempt)
    first, second = key_words(parts)
    return ((first & 0xFFFFFFFF) << 32 | (second & 0xFFFFFFFF)) & (2**63 - 1)


def _empty(request: GenerateRequest, reason: StopReason, error: str | None = None) -> Generation:
    """A generation without tokens."""
    return Generation(
        request_id=request.request_id,
        token_ids=[],
        log_probs=[],
        sampling_log_probs=[],
        spans=[],
        stop_reason=reason,
        error=error,
    )
