"""Tests of drafts by a quantized copy of the policy."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import pytest
import torch

from slipstream.errors import EngineError
from slipstream.inference.speculation.history import HistoryProposer
from slipstream.inference.speculation.plan import OFF, DraftPlan
from slipstream.inference.speculation.protocol import DraftBatch, DraftTree
from slipstream.inference.speculation.quantized import QuantizedProposer
from slipstream.inference.speculation.union import UnionProposer
from slipstream.models import Decoder
from slipstream.models.quantized_linear import Bits
from slipstream.types import KVPolicy, UpdateKind, WeightUpdate
from tests.inference.helpers import (
    all_bits,
    drain,
    make_decoder,
    make_engine,
    make_request,
    mixed_requests,
    shared_decoder,
    update_from,
)

DTYPES = (torch.float32, torch.bfloat16)
PLAN = DraftPlan.chain(3)


class Recorder(QuantizedProposer):
    """Records its chains as (position of the first draft token, tokens)."""

    def __init__(self, bits: Bits = 8) -> None:
        super().__init__(bits, bits)
        self.chains: list[tuple[int, list[int]]] = []

    def propose(self, batch: DraftBatch, plan: DraftPlan) -> list[DraftTree]:
        trees = super().propose(batch, plan)
        positions = batch.positions_N.tolist()
        self.chains += [
            (position, [*tree.tokens[1:]]) for position, tree in zip(positions, trees, strict=True)
        ]
        return trees


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_drafts_do_not_change_tokens_or_log_probs(dtype: torch.dtype, bits: Bits) -> None:
    requests = mixed_requests(count=14)
    plain = make_engine(dtype=dtype, max_num_seqs=4).run(requests)
    engine = make_engine(
        proposer=QuantizedProposer(bits, bits), plan=PLAN, dtype=dtype, max_num_seqs=4
    )
    assert all_bits(engine.run(requests)) == all_bits(plain)
    assert engine.stats().accepted_tokens > 0


def test_other_plans_preemption_and_history_do_not_change_tokens() -> None:
    decoder = shared_decoder(eos=7)
    requests = mixed_requests(count=12, seed=2)
    plain = make_engine(decoder, torch.bfloat16).run(requests)
    proposer = UnionProposer(QuantizedProposer(8, 4), HistoryProposer(match=1))
    engine = make_engine(decoder, torch.bfloat16, proposer=proposer, plan=PLAN, max_num_seqs=6)
    for request in requests:
        engine.add(request)
    done, steps = [], 0
    while engine.has_work():
        engine.plan = DraftPlan.chain(1 + steps % 5)
        if steps % 4 == 3:
            engine.preempt([request.request_id for request in requests[steps % 12 :]])
        done += engine.step()
        steps += 1
    assert all_bits(done) == all_bits(plain)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.0}, {"temperature": 0.4}, {"temperature": 1.3, "top_k": 4}],
)
def test_the_copy_drafts_what_the_policy_samples(
    dtype: torch.dtype, settings: dict[str, Any]
) -> None:
    """Also if it reads the policy's keys and values of a long context, and beyond its first token,
    where it reads its own."""
    request = make_request(
        "a", [3 + (j * j) % 40 for j in range(150)], max_tokens=120, ignore_eos=True, **settings
    )
    proposer = Recorder()
    (done,) = make_engine(proposer=proposer, plan=PLAN, dtype=dtype).run([request])
    tokens = [*request.prompt_ids, *done.token_ids]
    equal = [0, 0, 0]
    for position, chain in proposer.chains[:-1]:
        for depth in range(3):
            equal[depth] += chain[: depth + 1] == tokens[position : position + depth + 1]
    drafted = len(proposer.chains) - 1
    assert drafted < 45
    assert min(equal) > 0.8 * drafted


def test_fewer_bits_accept_less() -> None:
    request = make_request("a", max_tokens=200, ignore_eos=True)
    steps = {}
    for bits in (4, 8):
        engine = make_engine(proposer=QuantizedProposer(bits, bits), plan=PLAN)
        engine.run([request])
        steps[bits] = engine.stats().decode_steps
    assert 50 <= steps[8] < steps[4] < 150


def test_a_weight_update_renews_the_copy() -> None:
    first, second = make_decoder(0), make_decoder(1)
    proposer = Recorder()
    engine = make_engine(make_decoder(0), proposer=proposer, plan=PLAN)
    request = make_request("a", max_tokens=100, ignore_eos=True)
    before = engine.run([request])
    assert all_bits(before) == all_bits(make_engine(first).run([request]))
    assert proposer.version == 1
    steps = engine.stats().decode_steps
    engine.update_weights(update_from(second, 1))
    proposer.chains.clear()
    after = engine.run([request])
    assert all_bits(after) == all_bits(make_engine(second).run([request]))
    assert proposer.version == 2
    # A copy of the old policy would draft other tokens, and need up to 99 steps.
    assert engine.stats().decode_steps - steps < 40
    fresh = Recorder()
    make_engine(second, proposer=fresh, plan=PLAN).run([request])
    assert proposer.chains == fresh.chains


@pytest.mark.parametrize("kv_policy", list(KVPolicy))
def test_an_update_in_mid_request_renews_the_copy(kv_policy: KVPolicy) -> None:
    """All engines update when the only request has 24 tokens."""
    found = []
    for proposer in (None, QuantizedProposer(8, 8)):
        engine = make_engine(make_decoder(0), proposer=proposer)
        engine.add(make_request("a", max_tokens=60, ignore_eos=True))
        while (count := engine.stats().generated_tokens) < 24:
            if proposer is not None:
                engine.plan = PLAN if count <= 20 else OFF
            engine.step()
        assert count == 24
        engine.update_weights(update_from(make_decoder(1), 1, kv_policy=kv_policy))
        if proposer is not None:
            engine.plan = PLAN
        found.append(all_bits(drain(engine)))
    assert found[0] == found[1]
    assert proposer is not None
    assert proposer.version == 2
    assert engine.stats().decode_steps < 40


def test_an_update_frees_the_old_policy_and_keeps_the_copys_memory() -> None:
    proposer = QuantizedProposer(8, 4)
    engine = make_engine(make_decoder(0), torch.bfloat16, proposer=proposer, plan=PLAN)
    engine.run([make_request("a")])
    panels = weakref.ref(engine._runner.packed.layers[0].qkv.panels)
    places = [memory.data_ptr() for memory in proposer._copy._memory]
    size = proposer.nbytes
    engine.update_weights(update_from(make_decoder(1), 1))
    gc.collect()
    assert panels() is None
    engine.run([make_request("b")])
    assert [memory.data_ptr() for memory in proposer._copy._memory] == places
    assert proposer.nbytes == size


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 5000.0])
def test_a_policy_with_extreme_weights_is_not_drafted_for(
    value: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Infinite keys or values of rejected drafts would make later tokens NaN."""

    def broken() -> Decoder:
        decoder = make_decoder(0, tie_word_embeddings=False)
        with torch.no_grad():
            decoder.model.embed_tokens.weight[0, 3] = value
        return decoder

    engine = make_engine(broken(), proposer=QuantizedProposer(), plan=PLAN)
    request = make_request("a", max_tokens=20)
    with caplog.at_level(logging.WARNING):
        done = engine.run([request])
    plain = make_engine(broken()).run([request])
    assert str(all_bits(done)) == str(all_bits(plain))  # NaN does not equal NaN
    assert engine.stats().decode_steps == 19
    assert engine.stats().draft_tokens == 0
    assert caplog.text.count("no drafts until the next weight update") == 1


def test_updates_of_a_draft_head_are_refused() -> None:
    engine = make_engine(proposer=QuantizedProposer(), plan=PLAN)
    update = WeightUpdate(version=3, buckets=[[]], kind=UpdateKind.DRAFT)
    with pytest.raises(EngineError, match="version 3 refused: a quantized copy"):
        engine.update_drafter(update)


@pytest.mark.parametrize("dtype", DTYPES)
def test_samples_that_share_the_blocks_of_a_prompt_keep_their_tokens(dtype: torch.dtype) -> None:
    # Prompts end before, at and after the end of a block, which the samples share.
    requests = [
        make_request(f"{length}/{i}", [3 + n % 40 for n in range(length)], max_tokens=70)
        for length in (63, 64, 65, 130)
        for i in range(3)
    ]
    engine = make_engine(proposer=QuantizedProposer(8, 8), plan=PLAN, dtype=dtype)
    assert all_bits(engine.run(requests)) == all_bits(make_engine(dtype=dtype).run(requests))
    assert engine.stats().accepted_tokens > 0
