"""The contract suite of `InferenceEngine`, second part: weight updates, refused requests, counters
and failures."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from slipstream.errors import CheckpointError, EngineError, RequestError
from slipstream.inference import sync_weights_to_engines
from slipstream.inference.driver import AsyncEngine
from slipstream.inference.protocol import EngineStats
from slipstream.models import save_checkpoint
from slipstream.types import (
    Generation,
    KVPolicy,
    StopReason,
    Transport,
    UpdateKind,
    VersionSpan,
    WeightUpdate,
)
from tests.inference.contract import (
    Harness,
    case,
    check_shape,
    driver_case,
    endless,
    gather,
    running,
    until,
)
from tests.inference.helpers import bits, make_request, update_from


@case
async def an_update_between_requests_changes_the_version(h: Harness) -> None:
    engine = h.protocol
    assert (await engine.generate(endless("w", 4))).spans == [VersionSpan(0, 0, 4)]
    await engine.update_weights(update_from(h.decoder(1), 3))
    assert engine.stats().version == 3
    assert (await engine.generate(endless("w", 4))).spans == [VersionSpan(3, 0, 4)]


@case
async def an_update_during_requests_splits_their_spans(h: Harness) -> None:
    engine = h.protocol
    for policy in KVPolicy:
        # Both requests must be running after the first step, and none may have ended.
        h.gate(0.1)
        results: dict[str, Generation] = {}
        version = engine.stats().version

        async def one(name: str, results: dict[str, Generation]) -> None:
            results[name] = await engine.generate(endless(name, 60))

        async with anyio.create_task_group() as tasks:
            for name in ("u0", "u1"):
                tasks.start_soon(one, name, results)
            await until(lambda: running(engine) == 2)
            await anyio.sleep(0.25)
            update = update_from(h.decoder(version + 1), version + 1, kv_policy=policy)
            await engine.update_weights(update)
            h.gate(0)
        for generation in results.values():
            check_shape(generation)
            assert len(generation.token_ids) == 60
            assert [s.version for s in generation.spans] == [version, version + 1]


@case
async def a_refused_update_changes_nothing(h: Harness) -> None:
    engine = h.protocol
    before = await engine.generate(endless("same", 20))
    tensors = [(n, p.detach().clone()) for n, p in h.decoder(1).named_parameters()]
    broken = [(n, torch.full_like(t, float("nan")) if "norm" in n else t) for n, t in tensors]
    with pytest.raises(EngineError, match="version 5 refused"):
        await engine.update_weights(WeightUpdate(version=5, buckets=[broken]))
    for kind in (UpdateKind.LORA, UpdateKind.DRAFT):
        with pytest.raises(EngineError, match=f"kind full, got {kind.value}"):
            await engine.update_weights(WeightUpdate(version=5, buckets=[tensors], kind=kind))
    with pytest.raises(EngineError, match="no draft head"):
        await engine.update_drafter(
            WeightUpdate(version=5, buckets=[tensors], kind=UpdateKind.DRAFT)
        )
    after = await engine.generate(endless("same", 20))
    assert bits(after) == bits(before)
    assert after.spans == [VersionSpan(0, 0, 20)]


@case
async def an_update_from_a_checkpoint_loads_its_weights(h: Harness) -> None:
    engine = h.protocol
    async with anyio.TemporaryDirectory() as name:
        folder = Path(name)
        save_checkpoint(h.decoder(1), folder)
        await engine.update_weights_from_checkpoint(folder, 2)
        assert (await engine.generate(endless("k", 4))).spans == [VersionSpan(2, 0, 4)]
        with pytest.raises(CheckpointError, match="missing does not exist"):
            await engine.update_weights_from_checkpoint(folder / "missing", 3)
        assert engine.stats().version == 2
        # Without a version, the version increases by 1.
        refused = await sync_weights_to_engines([engine], folder / "missing")
        assert await sync_weights_to_engines([engine], folder) == [{"success": True, "version": 3}]
    assert [record["success"] for record in refused] == [False]
    assert "missing does not exist" in refused[0]["error"]
    assert engine.stats().version == 3


@case
async def only_the_transports_of_the_capabilities_are_accepted(h: Harness) -> None:
    engine = h.protocol
    tensors = list(h.decoder(1).named_parameters())
    known = engine.capabilities.transports
    for version, transport in enumerate(Transport, start=1):
        update = WeightUpdate(version=version, buckets=[tensors], transport=transport)
        before = engine.stats().version
        if transport in known:
            await engine.update_weights(update)
            assert engine.stats().version == version
        else:
            with pytest.raises(EngineError, match=f"transport .*, got {transport.value}"):
                await engine.update_weights(update)
            assert engine.stats().version == before
    assert known == {Transport.REFERENCE}


@case
async def hidden_states_are_returned_or_refused_as_the_capabilities_say(h: Harness) -> None:
    request = make_request("h", max_tokens=4, ignore_eos=True, hidden=True)
    if not h.protocol.capabilities.hidden_states:
        with pytest.raises(RequestError, match="hidden states"):
            await h.protocol.generate(request)
        return
    generation = await h.protocol.generate(request)
    assert generation.hidden_states is not None
    assert tuple(generation.hidden_states.shape) == (4, 32)


@case
async def tokens_depend_on_the_noise_key_if_the_capabilities_promise_it(h: Harness) -> None:
    if not h.protocol.capabilities.keyed_noise:
        return
    first = endless("k", 20)
    other = replace(first, request_id="other")
    another = replace(first, key=replace(first.key, index=first.key.index + 1))
    tokens = [(await h.protocol.generate(each)).token_ids for each in (first, other, another)]
    assert tokens[0] == tokens[1]
    assert tokens[0] != tokens[2]


BAD: list[tuple[str, dict[str, Any]]] = [
    ("prompt is empty", {"prompt": ()}),
    ("token id 64 is outside the vocabulary of 64", {"prompt": (3, 64)}),
    ("token id -1 is outside", {"prompt": (-1,)}),
    ("token id 99 is outside", {"prior": (99,)}),
    ("token id 3.0 is of type float, not an integer", {"prompt": (3, 3.0)}),
    ("token id True is of type bool", {"prior": (True,)}),
    ("token id 70 is outside", {"stop_token_ids": (70,)}),
    ("max_tokens=0 must be at least 1", {"max_tokens": 0}),
    ("temperature=-0.5 must be 0", {"temperature": -0.5}),
    ("temperature=nan must be 0", {"temperature": float("nan")}),
    ("temperature=inf must be 0", {"temperature": float("inf")}),
    ("temperature=1e-30 must be 0", {"temperature": 1e-30}),
    ("top_p=0.0 must be in", {"top_p": 0.0}),
    ("top_p=1.5 must be in", {"top_p": 1.5}),
    ("min_p=1.0 must be in", {"min_p": 1.0}),
    ("top_k=1000000000000 must be at most", {"top_k": 10**12}),
    ("stop contains an empty string", {"stop": ("x", "")}),
    ("90 tokens of context plus max_tokens=7 exceed.*max_model_len=96", {"prompt": (3,) * 90}),
    ("96 tokens of context plus max_tokens=7", {"prompt": (3,) * 96}),
]


@case
async def invalid_requests_are_refused(h: Harness) -> None:
    for message, settings in BAD:
        with pytest.raises(RequestError, match=rf"request 'bad': .*{message}"):
            await h.protocol.generate(make_request("bad", **{"max_tokens": 7, **settings}))
    assert running(h.protocol) == 0
    edge = await h.protocol.generate(endless("edge", 6, prompt=(3,) * 90))
    assert len(edge.token_ids) == 6


@case
async def a_request_id_can_run_only_once_at_a_time(h: Harness) -> None:
    h.gate(0.02)
    results: list[Generation] = []

    async def one() -> None:
        results.append(await h.protocol.generate(endless("twin", 20)))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one)
        await anyio.lowlevel.checkpoint()
        with pytest.raises(RequestError, match=r"'twin': .*request_id is already running"):
            await h.protocol.generate(endless("twin", 20))
    assert len(results[0].token_ids) == 20
    await one()
    assert results[0].token_ids == results[1].token_ids


@case
async def counters_never_decrease(h: Harness) -> None:
    by_key = ("plan_seconds", "update_seconds", "server_checks")
    gauges = {"running", "waiting", "kv_bytes", "version", "plan", "server_share"}
    gauges |= {"server_difference", *by_key}
    names = [n for n in EngineStats.__slots__ if n not in gauges]
    seen = [h.protocol.stats()]
    for i in range(3):
        await gather(h.protocol, *(endless(f"n{i}{j}", 5) for j in range(3)))
        seen.append(h.protocol.stats())
    for left, right in pairwise(seen):
        assert all(getattr(left, n) <= getattr(right, n) for n in names)
        for name in by_key:
            before, after = getattr(left, name), getattr(right, name)
            assert all(after[key] >= value for key, value in before.items())
    assert seen[-1].finished == 9
    assert seen[-1].generated_tokens == 45
    assert seen[-1].running == seen[-1].waiting == 0


@driver_case
async def a_failing_step_reaches_every_caller(engine: AsyncEngine) -> None:
    core, original = engine.core, engine.core.step
    steps = 0

    def broken() -> list[Generation]:
        nonlocal steps
        steps += 1
        raise MemoryError("no room for 12 GB")

    core.step = broken  # type: ignore[method-assign]
    results = await gather(engine, *(endless(f"f{i}", 9) for i in range(4)))
    assert {g.stop_reason for g in results.values()} == {StopReason.ERROR}
    reason = f"engine {engine._name}: MemoryError: no room for 12 GB"
    assert {g.error for g in results.values()} == {reason}
    assert steps <= 4
    core.step = original  # type: ignore[method-assign]
    assert len((await engine.generate(endless("f0", 4))).token_ids) == 4


@driver_case
async def a_core_that_cannot_give_up_reaches_every_caller(engine: AsyncEngine) -> None:
    core = engine.core

    def broken(*_: object) -> list[Generation]:
        raise OSError("gone")

    core.step = core.abort = broken  # type: ignore[method-assign, assignment]
    results = await gather(engine, *(endless(f"g{i}", 9) for i in range(3)))
    assert {g.error for g in results.values()} == {f"engine {engine._name}: OSError: gone"}


@driver_case
async def lost_requests_are_errors(engine: AsyncEngine) -> None:
    engine.core.step = lambda: []  # type: ignore[method-assign]
    engine.core.has_work = lambda: False  # type: ignore[method-assign]
    results = await gather(engine, endless("l0"), endless("l1"))
    assert {g.error for g in results.values()} == {"the engine lost the request"}


@case
async def a_closed_engine_says_so(h: Harness) -> None:
    h.engine.close()
    with pytest.raises(EngineError, match="is closed"):
        await h.protocol.generate(endless("z"))
    h.check_idle()
