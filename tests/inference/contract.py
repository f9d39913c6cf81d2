"""The contract suite of `InferenceEngine`: one set of test cases for every implementation.

`test_contract.py` runs it on `embedded`, `hf` and `fake`, and `servers/test_vllm.py` on vLLM.
`contract_updates.py` adds cases about weight updates, refused requests and failures. A case is a
coroutine that receives a `Harness`. It may depend on the number of generated tokens, but not on
their ids.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import anyio
import anyio.lowlevel

from slipstream.inference.driver import AsyncEngine
from slipstream.inference.protocol import InferenceEngine
from slipstream.inference.servers.engine import ServedEngine
from slipstream.models import Decoder
from slipstream.types import (
    GenerateRequest,
    Generation,
    StopReason,
    VersionSpan,
)
from tests.inference.helpers import EOS, decode, make_decoder, make_request


@dataclass(slots=True)
class Harness:
    """An engine under test, with `max_model_len` 96 and `decode`.

    Engines with a model have the weights of `decoder(0, eos=EOS)`. `gate` sets a delay in seconds
    for every step, so that a case can act while requests run.
    """

    engine: AsyncEngine | ServedEngine
    gate: Callable[[float], None]
    decoder: Callable[..., Decoder] = make_decoder

    @property
    def protocol(self) -> InferenceEngine:
        return self.engine

    @property
    def repeatable(self) -> dict[str, Any]:
        """Settings with which a continued response has the tokens of the uninterrupted one."""
        return {} if self.protocol.capabilities.keyed_noise else {"temperature": 0.0}

    def check_idle(self) -> None:
        """Check that no `generate` call is left."""
        if isinstance(self.engine, AsyncEngine):
            assert self.engine._tickets == {}
            assert self.engine._leader is None
        elif isinstance(self.engine, ServedEngine):
            assert self.engine._calls == {}


Case = Callable[[Harness], Awaitable[None]]
CASES: list[Case] = []
DRIVER_CASES: list[Callable[[AsyncEngine], Awaitable[None]]] = []
"""Cases for engines that run a core in this process (`AsyncEngine`)."""


def case(function: Case) -> Case:
    """Add a case to the suite."""
    CASES.append(function)
    return function


def driver_case(
    function: Callable[[AsyncEngine], Awaitable[None]],
) -> Callable[[AsyncEngine], Awaitable[None]]:
    """Add a case for engines that run a core in this process."""
    DRIVER_CASES.append(function)
    return function


def endless(name: str, max_tokens: int = 60, **more: Any) -> GenerateRequest:
    """A request that ignores the end-of-sequence token, so it runs to `max_tokens`."""
    return make_request(name, max_tokens=max_tokens, ignore_eos=True, **more)


def check_shape(generation: Generation) -> None:
    """Check that the lists of a generation have consistent lengths and valid values."""
    n = len(generation.token_ids)
    assert len(generation.log_probs) == len(generation.sampling_log_probs) == n
    assert [span.start for span in generation.spans[:1]] == [0] * min(n, 1)
    for left, right in pairwise(generation.spans):
        assert left.end == right.start
        assert left.version != right.version
    assert (generation.spans[-1].end if generation.spans else 0) == n
    assert all(math.isfinite(x) and x <= 0 for x in generation.log_probs)
    assert (generation.error is not None) == (generation.stop_reason is StopReason.ERROR)


async def gather(engine: InferenceEngine, *requests: GenerateRequest) -> dict[str, Generation]:
    """Run requests concurrently and return their generations by request id."""
    results: dict[str, Generation] = {}

    async def one(request: GenerateRequest) -> None:
        results[request.request_id] = await engine.generate(request)

    async with anyio.create_task_group() as tasks:
        for request in requests:
            tasks.start_soon(one, request)
    for generation in results.values():
        check_shape(generation)
    return results


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition becomes true."""
    while not condition():  # noqa: ASYNC110 (there is no event to wait for)
        await anyio.sleep(0.001)


def running(engine: InferenceEngine) -> int:
    """The number of requests that run or wait."""
    stats = engine.stats()
    return stats.running + stats.waiting


@case
async def concurrent_requests_equal_sequential_ones(h: Harness) -> None:
    requests = [make_request(f"m{i}", [3 + i] * (1 + i), max_tokens=5 + i) for i in range(9)]
    together = await gather(h.protocol, *requests)
    assert set(together) == {r.request_id for r in requests}
    for request in requests:
        alone = await h.protocol.generate(request)
        assert alone.error is None
        assert alone.token_ids == together[request.request_id].token_ids
        assert len(alone.token_ids) <= request.params.max_tokens
        assert alone.text == decode(alone.token_ids)
    h.check_idle()
    assert running(h.protocol) == 0


@case
async def token_limits_stop_tokens_and_stop_strings_end_responses(h: Harness) -> None:
    engine = h.protocol
    full = await engine.generate(endless("s", 30))
    assert full.stop_reason is StopReason.LENGTH
    assert len(full.token_ids) == 30
    assert full.spans == [VersionSpan(0, 0, 30)]

    one = await engine.generate(endless("s", 1))
    assert one.token_ids == full.token_ids[:1]
    assert one.stop_reason is StopReason.LENGTH

    token = full.token_ids[7]
    first = full.token_ids.index(token)
    stopped = await engine.generate(endless("s", 30, stop_token_ids=(token,)))
    assert stopped.stop_reason is StopReason.STOP_TOKEN
    assert stopped.token_ids == full.token_ids[: first + 1]

    text = full.text[5:8]
    at = full.text.index(text)
    stopped = await engine.generate(endless("s", 30, stop=("no such text", text)))
    assert stopped.stop_reason is StopReason.STOP_STRING
    assert stopped.text == full.text[:at]
    assert stopped.text + text == decode(stopped.token_ids)


@case
async def eos_ends_a_response_unless_it_is_ignored(h: Harness) -> None:
    # With up to 200 samples, one of them contains EOS.
    for i in range(200):
        name = f"e{i}"
        ended = await h.protocol.generate(make_request(name, max_tokens=60))
        if ended.stop_reason is StopReason.EOS:
            break
    assert ended.stop_reason is StopReason.EOS
    assert ended.token_ids.index(EOS) == len(ended.token_ids) - 1
    longer = await h.protocol.generate(endless(name, len(ended.token_ids) + 2))
    assert longer.token_ids[: len(ended.token_ids)] == ended.token_ids
    assert longer.stop_reason is StopReason.LENGTH


@case
async def prior_ids_continue_a_response(h: Harness) -> None:
    more = h.repeatable
    full = await h.protocol.generate(endless("p", 20, **more))
    rest = await h.protocol.generate(endless("p", 12, prior=full.token_ids[:8], **more))
    assert rest.token_ids == full.token_ids[8:]
    assert decode(full.token_ids[:8]) + rest.text == full.text
    # A stop string may begin in the prior tokens and end in the new ones.
    text = decode(full.token_ids[7:9])
    across = await h.protocol.generate(
        endless("p", 12, prior=full.token_ids[:8], stop=(text, "no such text"), **more)
    )
    if text not in decode(full.token_ids[:8]):
        assert across.stop_reason is StopReason.STOP_STRING
        assert across.token_ids == full.token_ids[8:9]
        assert across.text == ""


@case
async def abort_by_id_returns_partial_generations(h: Harness) -> None:
    engine = h.protocol
    h.gate(0.02)
    results: dict[str, Generation] = {}
    aborted: list[Generation] = []

    async def one(name: str, tokens: int) -> None:
        results[name] = await engine.generate(endless(name, tokens))

    async with anyio.create_task_group() as tasks:
        for i in range(4):
            tasks.start_soon(one, f"a{i}", 80 if i < 2 else 30)
        await until(lambda: running(engine) == 4)
        await anyio.sleep(0.02)
        aborted += await engine.abort(["a0", "unknown", "a1"])
        assert await engine.abort(["unknown"]) == []
    assert {g.request_id for g in aborted} == {"a0", "a1"}
    for generation in aborted:
        assert results[generation.request_id] == generation
        assert generation.stop_reason is StopReason.ABORT
        assert len(generation.token_ids) < 80
        check_shape(generation)
    assert len(results["a2"].token_ids) == len(results["a3"].token_ids) == 30
    assert await engine.abort() == []
    assert engine.stats().aborted == 2


@case
async def abort_without_ids_stops_all_requests(h: Harness) -> None:
    engine = h.protocol
    h.gate(0.004)
    results: list[Generation] = []
    aborted: list[Generation] = []

    async def one(name: str) -> None:
        results.append(await engine.generate(endless(name, 80)))

    async with anyio.create_task_group() as tasks:
        for i in range(5):
            tasks.start_soon(one, f"all{i}")
        # At this point some calls have not passed their request to the core yet.
        await anyio.lowlevel.checkpoint()
        aborted += await engine.abort()
    assert {g.request_id for g in results} == {f"all{i}" for i in range(5)}
    by_name = {g.request_id: g for g in aborted}
    assert all(g == by_name[g.request_id] for g in results)
    assert {g.stop_reason for g in results} == {StopReason.ABORT}
    assert (await engine.generate(endless("all0", 3))).stop_reason is StopReason.LENGTH


@case
async def aborted_requests_can_be_continued(h: Harness) -> None:
    engine = h.protocol
    full = await engine.generate(endless("again", 50, **h.repeatable))
    h.gate(0.02)
    parts: list[Generation] = []

    async def one() -> None:
        parts.append(await engine.generate(endless("again", 50, **h.repeatable)))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one)
        await until(lambda: running(engine) == 1)
        await anyio.sleep(0.01)
        await engine.abort(["again"])
    h.gate(0)
    prior = parts[0].token_ids
    assert len(prior) < 50
    rest = await engine.generate(endless("again", 50 - len(prior), prior=prior, **h.repeatable))
    assert prior + rest.token_ids == full.token_ids


@case
async def cancelling_one_call_does_not_affect_others(h: Harness) -> None:
    engine = h.protocol
    reference = await gather(engine, *(endless(f"c{i}", 40) for i in range(3)))
    h.gate(0.01)
    for cancelled in range(3):  # Call 0 is the leader.
        results: dict[str, Generation] = {}
        scopes = [anyio.CancelScope() for _ in range(3)]

        async def one(
            i: int, scopes: list[anyio.CancelScope], results: dict[str, Generation]
        ) -> None:
            with scopes[i]:
                results[f"c{i}"] = await engine.generate(endless(f"c{i}", 40))

        async with anyio.create_task_group() as tasks:
            for i in range(3):
                tasks.start_soon(one, i, scopes, results)
            await until(lambda: running(engine) == 3)
            await anyio.sleep(0.01)
            scopes[cancelled].cancel()
        assert f"c{cancelled}" not in results
        assert len(results) == 2
        for name, generation in results.items():
            assert generation.token_ids == reference[name].token_ids
        assert running(engine) == 0
    assert engine.stats().aborted == 3


@case
async def cancelling_all_calls_leaves_no_requests(h: Harness) -> None:
    h.gate(0.004)
    for delay in (0, 0.001, 0.01):
        with anyio.move_on_after(10) as scope:
            async with anyio.create_task_group() as tasks:
                for i in range(6):
                    tasks.start_soon(h.protocol.generate, endless(f"x{i}", 80))
                await anyio.sleep(delay)
                tasks.cancel_scope.cancel()
        assert not scope.cancelled_caught
        assert running(h.protocol) == 0
        h.check_idle()
    h.gate(0)
    assert len((await h.protocol.generate(endless("x0", 4))).token_ids) == 4


@case
async def a_call_can_have_a_timeout(h: Harness) -> None:
    h.gate(0.005)
    with anyio.move_on_after(0.03) as scope:
        await h.protocol.generate(endless("late", 90))
    assert scope.cancelled_caught
    assert running(h.protocol) == 0


@case
async def pause_stops_decoding_until_resume(h: Harness) -> None:
    engine = h.protocol
    reference = await gather(engine, endless("p0", 40), endless("p1", 40))
    h.gate(0.01)
    results: dict[str, Generation] = {}

    async def one(name: str) -> None:
        results[name] = await engine.generate(endless(name, 40))

    async with anyio.create_task_group() as tasks:
        for name in ("p0", "p1"):
            tasks.start_soon(one, name)
        await until(lambda: running(engine) == 2)
        await anyio.sleep(0.01)
        await engine.pause()
        await engine.pause()
        steps = engine.stats().generated_tokens
        tasks.start_soon(one, "p2")
        await anyio.sleep(0.03)
        assert engine.stats().generated_tokens == steps
        assert not results
        # Requests that arrive while the engine is paused can be aborted, too.
        tasks.start_soon(one, "p3")
        await until(lambda: running(engine) == 4)
        await engine.abort(["p2", "p3"])
        await until(lambda: len(results) == 2)
        await engine.resume()
    for name, generation in reference.items():
        assert results[name].token_ids == generation.token_ids
    assert results["p2"].token_ids == []


@case
async def the_leader_can_be_aborted_while_paused(h: Harness) -> None:
    results: list[Generation] = []

    async def one() -> None:
        results.append(await h.protocol.generate(endless("lead", 40)))

    await h.protocol.pause()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one)
        await until(lambda: running(h.protocol) == 1)
        await anyio.sleep(0.005)
        await h.protocol.abort()
    assert results[0].stop_reason is StopReason.ABORT
    await h.protocol.resume()
