"""Whether the embedded engine copies the policy's weights."""

from __future__ import annotations

from functools import partial
from typing import cast

import torch

from slipstream.build.engine import make_engine
from slipstream.build.policy import make_decoder
from slipstream.config import Hardware, load_config
from slipstream.data.tokenizer import build_tokenizer
from slipstream.inference.embedded import EmbeddedEngine
from slipstream.training.compute_thread import ComputeThread


def test_only_trained_weights_are_copied() -> None:
    config = load_config(
        recipe="tiny", hardware=Hardware(gpus=0), overrides=[], notify=lambda _: None
    )
    tokenizer = build_tokenizer()
    policy = make_decoder(config, tokenizer, None)
    compute = ComputeThread()
    state = torch.get_rng_state()
    try:
        engines = [
            cast(
                EmbeddedEngine,
                compute.run(
                    partial(make_engine, config, policy, tokenizer, compute, trained=trained)
                ),
            )
            for trained in (True, False)
        ]
        copied, own = (engine.decoder for engine in engines)
        assert own is policy
        assert copied is not policy
        for ours, theirs in zip(copied.parameters(), policy.parameters(), strict=True):
            assert torch.equal(ours, theirs)
            assert ours.data_ptr() != theirs.data_ptr()
    finally:
        compute.close()
    # The copy draws no initial weights, which it would overwrite.
    assert torch.equal(torch.get_rng_state(), state)
