"""Exact mode with scaled rotary embeddings, with and without drafts."""

from __future__ import annotations

import pytest
import torch

from slipstream.errors import RequestError
from slipstream.inference.speculation.eagle import EagleProposer
from slipstream.inference.speculation.plan import DraftPlan
from slipstream.models.draft.eagle1 import DraftHead
from slipstream.models.rope_scaling import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    YarnScaling,
)
from tests.inference.helpers import (
    all_bits,
    make_decoder,
    make_engine,
    make_request,
    mixed_requests,
    trainer_log_probs,
)

ORIGINAL = 32
SCALINGS: list[RopeScaling] = [
    LinearScaling(factor=2.0),
    DynamicScaling(factor=2.0),
    Llama3Scaling(
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=ORIGINAL,
    ),
    YarnScaling(factor=4.0, original_max_position_embeddings=ORIGINAL),
    LongRopeScaling(
        short_factor=tuple(1 + i / 4 for i in range(8)),
        long_factor=(8.0,) * 8,
        original_max_position_embeddings=128,
        factor=2.0,
    ),
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling.kind)
def test_engine_and_trainer_compute_the_same_bits(scaling: RopeScaling, dtype: torch.dtype) -> None:
    decoder = make_decoder(rope_scaling=scaling)
    # Some contexts are longer than the original context length.
    requests = mixed_requests(5, longest=50, tokens=14, seed=4)
    done = make_engine(decoder, dtype, max_num_seqs=1).run(requests)
    for request, generation in zip(requests, done, strict=True):
        assert generation.log_probs == trainer_log_probs(decoder, dtype, request, generation)
    assert all_bits(make_engine(decoder, dtype).run(requests)) == all_bits(done)
    plain = make_engine(make_decoder(), dtype).run(requests)
    assert (all_bits(plain) == all_bits(done)) == (scaling.kind == "dynamic")
    head = DraftHead(decoder.config)
    head.init_weights(1)
    proposer = EagleProposer(head, dtype=dtype)
    engine = make_engine(decoder, dtype, proposer=proposer, plan=DraftPlan.chain(3))
    assert all_bits(engine.run(requests)) == all_bits(done)
    assert engine.stats().accepted_tokens > 0


def test_requests_beyond_the_sliding_window_are_refused() -> None:
    decoder = make_decoder(family="mistral", sliding_window=48, windowed_layers=(0, 1))
    engine = make_engine(decoder)
    assert engine.run([make_request("fits", [5] * 40, max_tokens=8)])[0].token_ids
    with pytest.raises(RequestError, match="48"):
        engine.add(make_request("long", [5] * 41, max_tokens=8))
