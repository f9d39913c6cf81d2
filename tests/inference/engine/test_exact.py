"""Exact mode: a response has the same bits, independent of batching, preemption and scheduling."""

from __future__ import annotations

import random

import pytest
import torch

from slipstream.errors import ConfigError, EngineError
from slipstream.inference.engine import Engine
from slipstream.types import (
    GenerateRequest,
    Generation,
    KVPolicy,
    StopReason,
    VersionSpan,
    WeightUpdate,
)
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

SLOT_BYTES = 2 * 2 * 2 * 16
"""Elements of one slot of one row: layers * (keys and values) * heads * head width."""


def test_batch_limits_and_arrival_order_do_not_change_bits(dtype: torch.dtype) -> None:
    count, tokens = (14, 40) if dtype == torch.float32 else (8, 12)
    requests = mixed_requests(count, tokens=tokens)
    reference = all_bits(make_engine(dtype=dtype, max_num_seqs=1).run(requests))
    assert len({tuple(tokens) for tokens, _, _ in reference.values()}) == count

    for limit in (7, 64):
        shuffled = random.Random(limit).sample(requests, count)
        engine = make_engine(dtype=dtype, max_num_seqs=limit)
        assert all_bits(engine.run(shuffled)) == reference


def test_arrivals_during_decoding_do_not_change_bits(dtype: torch.dtype) -> None:
    requests = mixed_requests(8, tokens=12, seed=1)
    reference = all_bits(make_engine(dtype=dtype).run(requests))

    engine, done = make_engine(dtype=dtype), []
    for request in requests:
        engine.add(request)
        done += engine.step() + engine.step()
    assert all_bits(done + drain(engine)) == reference


def test_preemption_does_not_change_bits(dtype: torch.dtype) -> None:
    requests = mixed_requests(6, tokens=20, seed=2)
    reference = all_bits(make_engine(dtype=dtype).run(requests))
    rng = random.Random(0)

    engine, done = make_engine(dtype=dtype), []
    for request in requests:
        engine.add(request)
    while engine.has_work():
        done += engine.step()
        if rng.random() < 0.5:
            engine.preempt([f"r{rng.randrange(6)}", f"r{rng.randrange(6)}"])
    assert all_bits(done) == reference
    assert engine.stats().preempted > 3


def test_a_small_kv_budget_preempts_and_does_not_change_bits() -> None:
    requests = [make_request(f"r{i}", [3 + i] * (40 + i), max_tokens=60) for i in range(7)]
    reference = all_bits(make_engine().run(requests))
    # 4 rows of 128 slots: seven requests fit with 64 slots each, but only four with more.
    budget = 4 * 128 * SLOT_BYTES * 4

    engine = make_engine(kv_budget_bytes=budget)
    for request in requests:
        engine.add(request)
    done, most = [], 0
    while engine.has_work():
        done += engine.step()
        most = max(most, engine.stats().kv_bytes)
    assert all_bits(done) == reference
    assert engine.stats().preempted >= 3
    assert most == budget
    # Requests are served in order of arrival, so the oldest are never preempted.
    assert {g.request_id for g in done[:4]} == {"r0", "r1", "r2", "r3"}


def test_aborted_requests_continued_with_prior_ids_have_the_same_bits(dtype: torch.dtype) -> None:
    requests = mixed_requests(6, tokens=20, seed=3)
    requests = [r for r in requests if r.params.max_tokens > 3]
    reference = all_bits(make_engine(dtype=dtype).run(requests))

    engine = make_engine(dtype=dtype)
    for request in requests:
        engine.add(request)
    for _ in range(2):
        assert not engine.step()
    first = {g.request_id: g for g in engine.abort()}
    assert not engine.has_work()
    assert {g.stop_reason for g in first.values()} == {StopReason.ABORT}
    for request in requests:
        part = first[request.request_id]
        assert len(part.token_ids) == len(part.log_probs) == 3
        left = request.params.max_tokens - len(part.token_ids)
        values = {n: getattr(request.params, n) for n in request.params.__slots__}
        resumed = GenerateRequest(
            request_id=request.request_id,
            prompt_ids=request.prompt_ids,
            prior_ids=tuple(part.token_ids),
            params=type(request.params)(**{**values, "max_tokens": left}),
            key=request.key,
        )
        rest = engine.run([resumed])[0]
        ids, log_probs, sampling_log_probs = reference[request.request_id]
        assert part.token_ids + rest.token_ids == ids
        assert part.log_probs + rest.log_probs == log_probs
        assert part.sampling_log_probs + rest.sampling_log_probs == sampling_log_probs


def test_a_shared_prefill_gives_the_bits_of_separate_ones(dtype: torch.dtype) -> None:
    prompt = random_prompt(random.Random(4), 45)
    requests = [make_request(f"s{i}", prompt, max_tokens=8) for i in range(5)]
    other = make_request("other", prompt[:9], max_tokens=8)

    engine = make_engine(dtype=dtype)
    together = engine.run([*requests, other])
    assert engine.stats().prompt_tokens == 45 + 9
    assert engine.stats().shared_prompt_tokens == 4 * 45
    assert len({tuple(g.token_ids) for g in together}) == 6
    for request, generation in zip([*requests, other], together, strict=True):
        assert bits(make_engine(dtype=dtype).run([request])[0]) == bits(generation)


def test_contexts_of_60_to_2000_tokens_with_preemption_have_the_trainers_bits() -> None:
    rng = random.Random(11)
    lengths = (60, 61, 127, 300, 513, 800, 1030, 1500, 2000)
    requests = [
        make_request(f"c{length}", random_prompt(rng, length), max_tokens=6 + length % 5)
        for length in lengths
    ]
    reference = make_engine(max_num_seqs=1).run(requests)
    for limit in (7, 64):
        engine, done = make_engine(max_num_seqs=limit), list[Generation]()
        for request in random.Random(limit).sample(requests, len(requests)):
            engine.add(request)
        steps = 0
        while engine.has_work():
            done += engine.step()
            steps += 1
            if steps % 3 == 0:
                engine.preempt([request.request_id for request in requests[steps % 2 :: 2]])
        assert engine.stats().preempted > 4
        assert all_bits(done) == all_bits(reference)
    for request, generation in zip(requests, reference, strict=True):
        expected = trainer_log_probs(shared_decoder(), torch.float32, request, generation)
        assert generation.log_probs == expected


def test_multithreaded_products_give_the_same_bits() -> None:
    # Large enough that every matrix product is split among the threads.
    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_heads": 32, "vocab_size": 640}
    decoder = make_decoder(0, num_kv_heads=8, **sizes)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.ndim == 2:
                parameter.mul_(0.35)
    requests = mixed_requests(12, tokens=14, seed=9)
    reference = make_engine(decoder, max_num_seqs=1).run(requests)
    for limit in (5, 64):
        done = make_engine(decoder, max_num_seqs=limit).run(requests)
        assert all_bits(done) == all_bits(reference)
    for request, generation in zip(requests, reference, strict=True):
        expected = trainer_log_probs(decoder, torch.float32, request, generation)
        assert generation.log_probs == expected
    assert len({token for g in reference for token in g.token_ids}) > 20


def test_log_probs_equal_the_trainers(dtype: torch.dtype) -> None:
    requests = mixed_requests(8, tokens=14, seed=5)
    done = make_engine(dtype=dtype).run(requests)
    for request, generation in zip(requests, done, strict=True):
        expected = trainer_log_probs(shared_decoder(), dtype, request, generation)
        assert generation.log_probs == expected


@pytest.mark.parametrize("lengths", [(60, 130), (508, 700), (1020, 1500), (2000,)])
def test_long_contexts_have_the_same_bits_alone_and_in_a_batch(
    dtype: torch.dtype, lengths: tuple[int, ...]
) -> None:
    rng = random.Random(6)
    decoder = shared_decoder()
    if dtype == torch.bfloat16 or max(lengths) > 1000:
        # bf16 is emulated on many CPUs, so the model is small.
        decoder = make_decoder(num_layers=1, num_heads=1, num_kv_heads=1)
    requests = [make_request(f"n{n}", random_prompt(rng, n), max_tokens=7) for n in lengths]
    short = make_request("short", (5, 6), max_tokens=12)

    together = all_bits(make_engine(decoder, dtype).run([short, *requests]))

    for request in requests:
        engine = make_engine(decoder, dtype)
        engine.add(request)
        for _ in range(4):
            engine.step()
        engine.preempt([request.request_id])
        alone = drain(engine)[0]
        assert bits(alone) == together[request.request_id]
        assert alone.log_probs == trainer_log_probs(decoder, dtype, request, alone)


def run_with_update(
    policy: KVPolicy,
    dtype: torch.dtype,
    *,
    preempt_at: tuple[int, ...],
    same_version: bool = False,
) -> tuple[dict[str, Generation], Engine]:
    """Run two requests, with a weight update when both have 5 tokens.

    Both are preempted at the token counts in `preempt_at`; -5 means 5 tokens, but after the update.
    Token counts are used instead of steps, because a step after preemption gives two tokens.
    """
    decoder, new = make_decoder(0), make_decoder(1)
    engine = make_engine(decoder, dtype)
    for i in range(2):
        engine.add(make_request(f"u{i}", [7 + i] * (5 + i), max_tokens=12))
    done: list[Generation] = []
    updated = 0
    while engine.has_work():
        tokens = int(engine.stats().generated_tokens) // 2
        if tokens in preempt_at:
            engine.preempt(["u0", "u1"])
        if tokens == 5:
            engine.update_weights(update_from(new, 0 if same_version else 1, kv_policy=policy))
            updated += 1
        if -tokens in preempt_at:
            engine.preempt(["u0", "u1"])
        done += engine.step()
    assert updated == 1
    return {g.request_id: g for g in done}, engine


@pytest.mark.parametrize("policy", list(KVPolicy))
def test_an_update_during_requests_gives_the_same_bits_with_preemption(
    dtype: torch.dtype, policy: KVPolicy
) -> None:
    plain, _ = run_with_update(policy, dtype, preempt_at=())
    spans = [VersionSpan(0, 0, 5), VersionSpan(1, 5, 12)]
    assert [g.spans for g in plain.values()] == [spans, spans]

    for preempt_at in [(5,), (-5,), (7, 9), (3, 5, 7)]:
        got, engine = run_with_update(policy, dtype, preempt_at=preempt_at)
        # With RECOMPUTE, the update has already moved them to the queue.
        forced = 0 if policy is KVPolicy.RECOMPUTE and preempt_at == (-5,) else len(preempt_at)
        assert engine.stats().preempted == 2 * forced
        assert all_bits(list(got.values())) == all_bits(list(plain.values())), preempt_at
        assert [g.spans for g in got.values()] == [spans, spans]


def test_keep_and_recompute_give_different_log_probs() -> None:
    keep, _ = run_with_update(KVPolicy.KEEP, torch.float32, preempt_at=())
    recompute, _ = run_with_update(KVPolicy.RECOMPUTE, torch.float32, preempt_at=())
    for name in keep:
        # Token 5 attends to old keys and values with KEEP, and to new ones with RECOMPUTE.
        assert keep[name].log_probs[:5] == recompute[name].log_probs[:5]
        assert keep[name].log_probs[5] != recompute[name].log_probs[5]


def test_recompute_equals_a_prefill_with_the_new_weights() -> None:
    got, _ = run_with_update(KVPolicy.RECOMPUTE, torch.float32, preempt_at=())
    for i, generation in enumerate(got.values()):
        request = make_request(
            f"u{i}", [7 + i] * (5 + i), prior=generation.token_ids[:5], max_tokens=7
        )
        fresh = make_engine(make_decoder(1)).run([request])[0]
        assert fresh.log_probs == generation.log_probs[5:]


@pytest.mark.parametrize("policy", list(KVPolicy))
def test_an_update_with_the_same_version_number_still_changes_the_weights(policy: KVPolicy) -> None:
    plain, _ = run_with_update(policy, torch.float32, preempt_at=(), same_version=True)
    got, _ = run_with_update(policy, torch.float32, preempt_at=(-5, 8), same_version=True)
    assert all_bits(list(got.values())) == all_bits(list(plain.values()))
    assert [g.spans for g in got.values()] == [[VersionSpan(0, 0, 12)]] * 2


def test_an_update_saves_keys_and_values_of_preempted_requests() -> None:
    # They were dropped at the preemption, because the weights were still loaded.
    decoder, new = make_decoder(0), make_decoder(1)

    def run(*, preempt: bool) -> dict[str, Generation]:
        engine = make_engine(make_decoder(0), max_num_seqs=1)
        engine.add(make_request("first", [5] * 9, max_tokens=10))
        engine.step()
        if preempt:
            engine.preempt(["first"])
            before = engine.stats().kv_bytes
        engine.update_weights(update_from(new, 1))
        if preempt:
            # One block of slots is saved.
            assert engine.stats().kv_bytes == before + 32 * SLOT_BYTES * 4
            engine.add(make_request("second", [6] * 9, max_tokens=4))
        return {g.request_id: g for g in drain(engine)}

    assert bits(run(preempt=True)["first"]) == bits(run(preempt=False)["first"])
    old = make_engine(decoder).run([make_request("first", [5] * 9, max_tokens=10)])[0]
    assert old.token_ids[:2] == run(preempt=True)["first"].token_ids[:2]


def test_saved_requests_continue_with_one_row() -> None:
    def run(limit: int, *, disturb: bool) -> dict[str, Generation]:
        engine = make_engine(make_decoder(0), max_num_seqs=limit)
        for name in ("a", "b", "c"):
            engine.add(make_request(name, [9], max_tokens=8))
        done = engine.step() + engine.step()
        engine.update_weights(update_from(make_decoder(1), 1))
        if disturb:
            engine.preempt(["a"])
            assert engine.abort(["b"])[0].token_ids == []
            engine.preempt(["a", "b"])
        return {g.request_id: g for g in done + drain(engine)}

    plain, disturbed = run(3, disturb=False), run(1, disturb=True)
    assert bits(disturbed["a"]) == bits(plain["a"])
    # It had not started when the weights changed.
    assert disturbed["c"].spans == [VersionSpan(1, 0, 8)]


def test_training_works_after_an_engine_has_made_the_shared_tables() -> None:
    # Tables are shared and made at the first use. Training cannot use tensors of inference mode.
    decoder = make_decoder(rope_theta=4321.0)
    make_engine(decoder).run([make_request("first", max_tokens=3)])
    ids = torch.arange(32)[None]
    hidden = decoder.pack(torch.float32).forward(ids, ids).final
    hidden.sum().backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None for n, p in decoder.named_parameters() if "lm_head" not in n)


def test_hidden_states_equal_the_trainers() -> None:
    request = make_request("h", range(3, 40), max_tokens=20, hidden=True)
    generation = make_engine().run([request, make_request("other", max_tokens=25)])[0]
    ids = [*request.prompt_ids, *generation.token_ids]
    width = -(-len(ids) // 16) * 16
    with torch.no_grad():
        packed = shared_decoder().pack(torch.float32)
        row = torch.tensor(ids + [0] * (width - len(ids)))[None]
        final = packed.forward(row, torch.arange(width)[None]).final[0]
    assert generation.hidden_states is not None
    assert not generation.hidden_states.is_inference()
    assert torch.equal(generation.hidden_states, final[36:56])


@pytest.mark.parametrize("name", ["hidden_size", "intermediate_size", "head_dim"])
def test_widths_that_exact_mode_does_not_support_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}=40 is not a multiple of 16"):
        make_engine(make_decoder(**{name: 40}))


def test_exact_mode_supports_any_vocabulary_size(dtype: torch.dtype) -> None:
    decoder = make_decoder(vocab_size=67)
    requests = mixed_requests(7, tokens=12, seed=8)
    reference = all_bits(make_engine(decoder, dtype, max_num_seqs=1).run(requests))
    done = make_engine(decoder, dtype).run(requests)
    assert all_bits(done) == reference
    for request, generation in zip(requests, done, strict=True):
        expected = trainer_log_probs(decoder, dtype, request, generation)
        assert generation.log_probs == expected


def test_max_position_embeddings_need_not_be_a_multiple_of_the_padding() -> None:
    decoder = make_decoder(max_position_embeddings=62)
    request = make_request("edge", [5] * 61, max_tokens=1)
    generation = make_engine(decoder).run([request])[0]
    longer = make_engine(make_decoder(max_position_embeddings=128)).run([request])[0]
    assert bits(generation) == bits(longer)


def broken_updates() -> list[tuple[str, dict[str, torch.Tensor]]]:
    """Weights of another policy with one fault each, and the error message."""
    norm = "model.norm.weight"
    good = {name: p.detach() for name, p in make_decoder(1).named_parameters()}
    without = {name: tensor for name, tensor in good.items() if name != norm}
    return [
        (rf"{norm} has NaN", {**good, norm: torch.full((32,), float("nan"))}),
        (rf"{norm} has NaN or inf", {**good, norm: torch.full((32,), float("inf"))}),
        (rf"tensor {norm} is missing", without),
        (rf"tensor {norm} has shape \(33,\), expected \(32,\)", {**good, norm: torch.ones(33)}),
        (rf"tensor {norm} has dtype torch.int64", {**good, norm: torch.ones(32).long()}),
        (r"tensor model\.extra is not part of this model", {**good, "model.extra": torch.ones(2)}),
    ]


@pytest.mark.parametrize(
    ("message", "tensors"), broken_updates(), ids=lambda value: str(value)[:30]
)
def test_an_update_is_refused_as_a_whole(message: str, tensors: dict[str, torch.Tensor]) -> None:
    requests = mixed_requests(3)
    before = all_bits(make_engine(make_decoder(0)).run(requests))
    engine = make_engine(make_decoder(0), max_prefill_tokens=16)
    for request in requests:
        engine.add(request)
    done = engine.step()
    # Requests run, and a chunked prefill is unfinished.
    assert engine._scheduler.partial is not None
    with pytest.raises(
        EngineError, match=rf"version 7 refused, the weights in use stay: .*{message}"
    ):
        engine.update_weights(WeightUpdate(version=7, buckets=[list(tensors.items())]))
    assert engine._scheduler.partial is not None
    assert all_bits(done + drain(engine)) == before
    assert engine.version == 0
