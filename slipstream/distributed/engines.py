"""One engine interface over the engines of all processes.

Each engine has all weights. A group's first request goes to the engine with the fewest tokens left
to generate. The group's other requests go to the same engine, because they share the KV cache of
their prompt. The choice of the engine changes no token (`sampling`), only the time. `build` makes
the objects.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import anyio

from slipstream.distributed.backend import GatheredWeights, TeamBackend
from slipstream.distributed.team import Member, Team
from slipstream.inference.protocol import EngineStats, InferenceEngine
from slipstream.threads import arrival
from slipstream.types import (
    EngineCapabilities,
    GenerateRequest,
    Generation,
    KVPolicy,
    PolicyVersion,
    WeightUpdate,
)


class OwnEngine:
    """The engine of a host process, together with the trainer of that process."""

    def __init__(self, engine: InferenceEngine, backend: TeamBackend) -> None:
        self.engine = engine
        self.backend = backend

    async def load_gathered_weights(self, version: PolicyVersion, kv_policy: KVPolicy) -> None:
        """Load the trainer's current weights as `version`. Collective: all processes call it."""
        buckets = self.backend.gathered()
        await self.engine.update_weights(
            WeightUpdate(version=version, buckets=buckets, kv_policy=kv_policy)
        )


class RemoteEngine:
    """An `InferenceEngine` that calls the engine of another process. Both processes have the same
    kind of engine, so `capabilities` are this process's."""

    def __init__(self, member: Member, capabilities: EngineCapabilities) -> None:
        self._member = member
        self._capabilities = capabilities
        self._stats = EngineStats()
        self._stats_call: Future[Any] | None = None

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._capabilities

    async def generate(self, request: GenerateRequest) -> Generation:
        generation: Generation = await self._call("generate", request)
        return generation

    async def abort(self, request_ids: Sequence[str] | None = None) -> list[Generation]:
        found: list[Generation] = await self._call("abort", request_ids)
        return found

    async def pause(self) -> None:
        await self._call("pause")

    async def resume(self) -> None:
        await self._call("resume")

    async def update_weights(self, update: WeightUpdate) -> None:
        await self._call("update_weights", update)

    async def update_drafter(self, update: WeightUpdate) -> None:
        await self._call("update_drafter", update)

    async def update_weights_from_checkpoint(
        self, path: Path, version: PolicyVersion | None = None
    ) -> None:
        await self._call("update_weights_from_checkpoint", path, version)

    def stats(self) -> EngineStats:
        """Counters as of the last reply. The call also requests newer counters for the next
        call."""
        if self._stats_call is None or self._stats_call.done():
            self._stats_call = self._member.engine(uuid.uuid4().hex, "stats")
            self._stats_call.add_done_callback(self._on_reply)
        return self._stats

    def lend_to(self, lent: Callable[[bool], None]) -> None:
        """Cores of another process are not lent."""

    def close(self) -> None:
        """The engine ends with its process."""

    def _on_reply(self, answer: Future[Any]) -> None:
        if answer.exception() is None:
            self._stats = newer(self._stats, answer.result()[1])

    async def _call(self, method: str, *args: Any) -> Any:
        call = uuid.uuid4().hex
        future = self._member.engine(call, method, *args)
        try:
            await arrival(future)
        except anyio.get_cancelled_exc_class():
            self._member.withdraw(call)
            with anyio.CancelScope(shield=True):
                await arrival(future)
            self._on_reply(future)
            raise
        self._on_reply(future)
        return future.result()[0]


def newer(a: EngineStats, b: EngineStats) -> EngineStats:
    """The later of two readings of one engine's counters. Replies can arrive out of order."""
    return max(b, a, key=lambda stats: (stats.decode_steps, stats.finished + stats.aborted))


class EngineTeam:
    """An `InferenceEngine` over this process's engine and the engines of the team's members."""

    def __init__(self, own: InferenceEngine, team: Team) -> None:
        self._own = own
        self._team = team
        remote = [RemoteEngine(member, own.capabilities) for member in team.members]
        self._engines: list[InferenceEngine] = [own, *remote]
        self._load = [0] * len(self._engines)
        self._groups: dict[str, tuple[int, int]] = {}

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._own.capabilities

    async def generate(self, request: GenerateRequest) -> Generation:
        group = request.group or request.request_id
        place, running = self._groups.get(group, (self._load.index(min(self._load)), 0))
        self._groups[group] = place, running + 1
        self._load[place] += request.params.max_tokens
        try:
            return await self._engines[place].generate(request)
        finally:
            self._load[place] -= request.params.max_tokens
            place, running = self._groups.pop(group)
            if running > 1:
                self._groups[group] = place, running - 1

    async def abort(self, request_ids: Sequence[str] | None = None) -> list[Generation]:
        found: list[Generation] = []

        async def one(engine: InferenceEngine) -> None:
            found.extend(await engine.abort(request_ids))

        await self._each(one)
        return found

    async def pause(self) -> None:
        await self._each(lambda engine: engine.pause())

    async def resume(self) -> None:
        await self._each(lambda engine: engine.resume())

    async def update_weights(self, update: WeightUpdate) -> None:
        if isinstance(update.buckets, GatheredWeights):
            await self._gather(update, update.buckets)
            return
        await self._send(update, lambda engine, each: engine.update_weights(each))

    async def update_drafter(self, update: WeightUpdate) -> None:
        await self._send(update, lambda engine, each: engine.update_drafter(each))

    async def update_weights_from_checkpoint(
        self, path: Path, version: PolicyVersion | None = None
    ) -> None:
        if version is None:
            version = self.stats().version + 1
        await self._each(lambda engine: engine.update_weights_from_checkpoint(path, version))

    def lend_to(self, lent: Callable[[bool], None]) -> None:
        """This process's engine lends its cores."""
        self._own.lend_to(lent)

    def stats(self) -> EngineStats:
        return combined([engine.stats() for engine in self._engines])

    def close(self) -> None:
        """Close this process's engine; the others end with their processes."""
        self._own.close()

    async def _gather(self, update: WeightUpdate, weights: GatheredWeights) -> None:
        """Each engine loads the weights that the trainer of its process gathers."""
        weights.check()
        with self._team.collective(
            "engine", "load_gathered_weights", update.version, update.kv_policy
        ) as call:
            pass
        own = replace(update, buckets=weights.backend.gathered())
        try:
            await self._own.update_weights(own)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(call.wait)

    async def _send(
        self,
        update: WeightUpdate,
        take: Callable[[InferenceEngine, WeightUpdate], Awaitable[None]],
    ) -> None:
        """Send the same buckets to every engine. They are listed first, because an iterator of
        buckets can be consumed only once."""
        buckets = list(update.buckets)
        await self._each(lambda engine: take(engine, replace(update, buckets=list(buckets))))

    async def _each(self, work: Callable[[InferenceEngine], Awaitable[None]]) -> None:
        """Run `work` on all engines concurrently. Raises the first failure after all are done."""
        failures: list[Exception] = []

        async def one(engine: InferenceEngine) -> None:
            try:
                await work(engine)
            except Exception as error:
                failures.append(error)

        async with anyio.create_task_group() as tasks:
            for engine in self._engines:
                tasks.start_soon(one, engine)
        if failures:
            raise failures[0]


def combined(stats: Sequence[EngineStats]) -> EngineStats:
    """Combine the counters of engines that run concurrently.

    Counts are added. Seconds are averaged, so that they add up to the elapsed time. The plans are
    the first engine's.
    """
    first, count = stats[0], len(stats)
    total: dict[str, Any] = {}
    for f in fields(EngineStats):
        values = [getattr(each, f.name) for each in stats]
        if f.name == "version":
            total[f.name] = min(values)
        elif f.name == "max_batch":
            total[f.name] = max(values)
        elif f.name in ("server_share", "server_difference"):
            known = [value for value in values if value is not None]
            worst = min if f.name == "server_share" else max
            total[f.name] = worst(known, default=None)
        elif isinstance(values[0], Mapping):
            keys = dict.fromkeys(key for each in values for key in each)
            parts = count if f.name.endswith("_seconds") else 1
            total[f.name] = {k: sum(each.get(k, 0) for each in values) / parts for k in keys}
        elif f.name == "batch_seconds":
            total[f.name] = tuple(sum(column) / count for column in zip(*values, strict=True))
        elif isinstance(values[0], tuple):
            total[f.name] = tuple(sum(column) for column in zip(*values, strict=True))
        elif f.name.endswith("_seconds"):
            total[f.name] = sum(values) / count
        elif f.name != "plan":
            total[f.name] = sum(values)
    return replace(first, **total)
