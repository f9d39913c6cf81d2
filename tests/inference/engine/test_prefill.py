"""Chunked prefill: it gives the bits of one prefill, and running requests decode between chunks."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import anyio
import pytest
import torch

from slipstream.bench.speculation.drafters import LyingOracle
from slipstream.errors import ConfigError
from slipstream.inference.embedded import EmbeddedEngine
from slipstream.inference.engine import Engine, EngineSettings
from slipstream.inference.speculation.plan import DraftPlan
from slipstream.types import Generation, KVPolicy, StopReason, VersionSpan
from tests.inference.contract import until
from tests.inference.engine.test_speculation import oracle_of
from tests.inference.helpers import (
    all_bits,
    bits,
    drain,
    make_decoder,
    make_engine,
    make_request,
    mixed_requests,
    random_prompt,
    shared_decoder,
    trainer_log_probs,
    update_from,
)


def long_request(name: str, length: int, **more: Any) -> Any:
    return make_request(name, random_prompt(random.Random(length), length), **more)


@pytest.mark.parametrize("limit", [4, 20, 52, 100])
def test_chunk_boundaries_do_not_change_bits(dtype: torch.dtype, limit: int) -> None:
    requests = mixed_requests(8, tokens=8, seed=limit, longest=160)
    reference = make_engine(dtype=dtype).run(requests)
    engine = make_engine(dtype=dtype, max_prefill_tokens=limit)
    chunks = record_chunks(engine)
    assert all_bits(engine.run(requests)) == all_bits(reference)
    assert engine.stats().prompt_tokens == sum(len(r.prompt_ids) for r in requests)
    lengths = [len(r.prompt_ids) for r in requests]
    assert len(chunks) == sum(max(0, -(-(-(-n // 4) * 4 - limit) // limit)) for n in lengths)
    for request, generation in zip(requests, reference, strict=True):
        expected = trainer_log_probs(shared_decoder(), dtype, request, generation)
        assert generation.log_probs == expected


def record_chunks(engine: Engine) -> list[int]:
    """Return a list to which the length of each prefilled chunk is appended."""
    chunks: list[int] = []
    chunk = engine._prefill.chunk

    def counting(request: Any, weights: int) -> int:
        chunks.append(chunk(request, weights))
        return chunks[-1]

    engine._prefill.chunk = counting  # type: ignore[method-assign]
    return chunks


def test_chunks_of_long_contexts_give_the_same_bits(dtype: torch.dtype) -> None:
    decoder = make_decoder(num_layers=1, num_heads=1, num_kv_heads=1)
    length = 1100 if dtype == torch.float32 else 600
    request = long_request("long", length, max_tokens=4)
    (reference,) = make_engine(decoder, dtype).run([request])
    # Chunks end before, at and after multiples of KEY_CHUNK (128 or 512).
    for limit in (508, 512, 300) if dtype == torch.float32 else (508, 512):
        engine = make_engine(decoder, dtype, max_prefill_tokens=limit)
        chunks = record_chunks(engine)
        assert bits(engine.run([request])[0]) == bits(reference)
        assert chunks == [limit] * ((length - 1) // limit)
    assert reference.log_probs == trainer_log_probs(decoder, dtype, request, reference)


def test_large_matrix_products_have_the_same_bits_in_chunks() -> None:
    # Enough rows for several blocks of the matrix products.
    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_heads": 32, "vocab_size": 640}
    decoder = make_decoder(0, num_kv_heads=8, **sizes)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.ndim == 2:
                parameter.mul_(0.35)
    request = long_request("wide", 410, max_tokens=3)
    (reference,) = make_engine(decoder).run([request])
    for limit in (4, 140, 256):
        engine = make_engine(decoder, max_prefill_tokens=limit)
        assert bits(engine.run([request])[0]) == bits(reference)


def test_running_requests_decode_between_chunks() -> None:
    engine = make_engine(max_prefill_tokens=16)
    engine.add(make_request("runs", max_tokens=50, ignore_eos=True))
    engine.step()
    runs = engine._scheduler.running[0]
    engine.add(long_request("long", 100, max_tokens=5, ignore_eos=True))
    engine.add(make_request("behind", max_tokens=5, ignore_eos=True))
    tokens = []
    while len(engine._scheduler.running) < 3:
        engine.step()
        tokens.append(len(runs.token_ids))
    # 100 tokens are six chunks and a remainder, which is prefilled together with "behind".
    assert tokens == [3, 4, 5, 6, 7, 8, 9]
    assert [len(r.token_ids) for r in engine._scheduler.running] == [9, 2, 2]


def test_a_group_shares_a_chunked_prefill() -> None:
    prompt = random_prompt(random.Random(3), 90)
    requests = [make_request(f"g{i}", prompt, max_tokens=6) for i in range(5)]
    requests.append(make_request("other", prompt[:7], max_tokens=6))
    engine = make_engine(max_prefill_tokens=32)
    assert all_bits(engine.run(requests)) == all_bits(make_engine().run(requests))
    assert engine.stats().prompt_tokens == 90 + 7
    assert engine.stats().shared_prompt_tokens == 4 * 90


class Listener(LyingOracle):
    """A proposer without drafts that stores the features of each request's start."""

    def __init__(self) -> None:
        super().__init__({}, vocab_size=1, lies=0.0)
        self.features: dict[str, torch.Tensor | None] = {}

    def begin(
        self,
        request_id: str,
        prompt: Sequence[int],
        context: Sequence[int],
        features_TD: torch.Tensor | None,
    ) -> None:
        self.features[request_id] = None if features_TD is None else features_TD.clone()

    def observe(
        self,
        request_ids: Sequence[str],
        tokens: Sequence[Sequence[int]],
        features_NWD: torch.Tensor | None,
    ) -> None:
        """Does nothing, because nothing is proposed."""


def test_hidden_states_of_all_chunks_reach_the_proposer() -> None:
    requests = [long_request(f"f{n}", n, max_tokens=3, hidden=True) for n in (70, 9, 41)]
    whole, chunked = Listener(), Listener()
    reference = make_engine(proposer=whole).run(requests)
    done = make_engine(proposer=chunked, max_prefill_tokens=12).run(requests)
    for request, left, right in zip(requests, reference, done, strict=True):
        name, length = request.request_id, len(request.prompt_ids)
        features, expected = chunked.features[name], whole.features[name]
        assert features is not None
        assert expected is not None
        assert features.shape == (length, 32)
        assert torch.equal(features, expected)
        assert left.hidden_states is not None
        assert right.hidden_states is not None
        assert torch.equal(left.hidden_states, right.hidden_states)
        assert torch.equal(features[-1], right.hidden_states[0])


@pytest.mark.parametrize("policy", list(KVPolicy))
def test_an_update_during_a_chunked_prefill_starts_it_again(policy: KVPolicy) -> None:
    request = long_request("long", 90, max_tokens=8)
    expected = make_engine(make_decoder(1)).run([request])[0]
    engine = make_engine(make_decoder(0), max_prefill_tokens=32)
    engine.add(request)
    engine.step()
    assert engine._scheduler.partial is not None
    engine.update_weights(update_from(make_decoder(1), 1, kv_policy=policy))
    (done,) = drain(engine)
    assert bits(done) == bits(expected)
    assert done.spans == [VersionSpan(1, 0, 8)]
    assert engine.stats().prompt_tokens == 32 + 90


def test_an_update_while_a_preempted_request_is_prefilled_keeps_its_old_keys_and_values() -> None:

    def run(limit: int, *, preempt: bool) -> Generation:
        engine = make_engine(make_decoder(0), max_prefill_tokens=limit)
        engine.add(long_request("long", 90, max_tokens=8))
        while not engine._scheduler.running:
            engine.step()
        if preempt:
            engine.preempt(["long"])
            engine.step()
            assert engine._scheduler.partial is not None
        engine.update_weights(update_from(make_decoder(1), 1))
        return drain(engine)[0]

    plain = run(8192, preempt=False)
    assert plain.spans == [VersionSpan(0, 0, 2), VersionSpan(1, 2, 8)]
    disturbed = run(32, preempt=True)
    assert bits(disturbed) == bits(plain)
    assert disturbed.spans == plain.spans


def test_pause_update_and_resume_during_a_chunked_prefill() -> None:
    request = long_request("long", 90, max_tokens=8)
    expected = make_engine(make_decoder(1)).run([request])[0]
    settings = EngineSettings(max_model_len=128, dtype=torch.float32, max_prefill_tokens=8)
    engine = EmbeddedEngine(make_decoder(0), settings)
    step, started = engine.core.step, threading.Event()

    def slow_step() -> list[Generation]:
        started.set()
        time.sleep(0.02)
        return step()

    engine.core.step = slow_step  # type: ignore[method-assign]
    done: list[Generation] = []

    async def one() -> None:
        done.append(await engine.generate(request))

    async def run() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one)
            await until(started.is_set)
            await engine.pause()
            before = engine.stats().prompt_tokens
            assert 0 < before < 90
            assert engine.stats().waiting == 1
            await anyio.sleep(0.1)
            assert engine.stats().prompt_tokens == before
            await engine.update_weights(update_from(make_decoder(1), 1))
            await engine.resume()

    anyio.run(run)
    engine.close()
    assert bits(done[0]) == bits(expected)
    assert done[0].spans == [VersionSpan(1, 0, 8)]


def test_abort_during_a_chunked_prefill() -> None:
    engine = make_engine(max_prefill_tokens=32)
    engine.add(long_request("long", 150, max_tokens=8))
    other = make_request("other", max_tokens=30)
    engine.add(other)
    engine.step()
    engine.step()
    assert engine.stats().waiting == 2
    assert engine.stats().kv_bytes == 192 * 2 * 2 * 2 * 16 * 4
    (aborted,) = engine.abort(["long", "nobody"])
    assert (aborted.stop_reason, aborted.token_ids, aborted.spans) == (StopReason.ABORT, [], [])
    assert engine.stats().kv_bytes == 0
    assert bits(drain(engine)[0]) == bits(make_engine().run([other])[0])


def test_preemption_during_a_chunked_prefill_does_not_change_bits() -> None:
    requests = [
        make_request("first", max_tokens=30, ignore_eos=True),
        long_request("second", 80, max_tokens=12, ignore_eos=True),
        long_request("third", 120, max_tokens=12, ignore_eos=True),
    ]
    reference = make_engine().run(requests)
    engine, done = make_engine(max_prefill_tokens=20), list[Generation]()
    rng = random.Random(1)
    for request in requests:
        engine.add(request)
    while engine.has_work():
        done += engine.step()
        assert engine._scheduler.partial is None or engine._scheduler.waiting
        if rng.random() < 0.2:
            engine.preempt(["first", "second"])
    assert engine.stats().preempted > 3
    assert all_bits(done) == all_bits(reference)


def test_drafts_with_chunked_prefill_do_not_change_bits() -> None:
    requests = mixed_requests(7, tokens=20, seed=5, longest=120)
    reference = make_engine().run(requests)
    engine = make_engine(
        proposer=oracle_of(reference), plan=DraftPlan.chain(3), max_prefill_tokens=24
    )
    assert all_bits(engine.run(requests)) == all_bits(reference)
    assert engine.stats().accepted_tokens > 10


def test_a_limit_below_four_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_prefill_tokens=3 must be at least 4"):
        make_engine(max_prefill_tokens=3)
