"""What little trainers say of larger ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from slipstream.loops.footprint import _one_step, logits_bytes, measure_trainer
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Decoder
from slipstream.models.lora import LoraConfig, add_lora
from slipstream.training.compute_thread import ComputeThread
from slipstream.training.optim import OptimizerName, OptimSettings
from slipstream.training.single import SingleProcessBackend

CPU = torch.device("cpu")

CONFIG = ModelConfig(
    family="qwen3",
    vocab_size=512,
    hidden_size=64,
    intermediate_size=192,
    num_layers=5,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    eos_token_id=3,
)


@pytest.mark.parametrize(
    ("optimizer", "dtype", "recompute", "rank"),
    [
        ("AdamW", torch.float32, False, 0),
        ("AdamW", torch.bfloat16, False, 0),
        ("Muon", torch.float32, False, 0),
        ("AdamW", torch.float32, True, 0),
        ("AdamW", torch.float32, False, 8),
    ],
)
def test_larger_trainers_take_what_is_foretold(
    optimizer: OptimizerName, dtype: torch.dtype, recompute: bool, rank: int
) -> None:
    def make(decoder: Decoder, compute: ComputeThread) -> SingleProcessBackend:
        if rank:
            add_lora(decoder, LoraConfig(rank=rank, alpha=rank))
        return SingleProcessBackend(
            decoder,
            optim=OptimSettings(lr=1e-3, optimizer=optimizer, weight_decay=0.0),
            dtype=dtype,
            gradient_checkpointing=recompute,
            compute=compute,
        )

    foretold = measure_trainer(CONFIG, make, device=CPU, max_tokens=4096, recomputes=recompute)
    small = replace(CONFIG, eos_token_id=None)
    found = _one_step(small, make, CPU, rows=24, length=64)
    tokens = 24 * 64
    logits = logits_bytes(512, tokens, chunk=512, keep=600_000_000)
    step = foretold.step(5, 512, tokens, logits=logits)
    assert found.kept + step == pytest.approx(found.peak, rel=0.1)
    assert foretold.kept.at(5, 512, 0) == pytest.approx(found.kept, rel=0.02)


def test_weights_and_adams_moments_are_twelve_bytes_a_parameter() -> None:
    def make(decoder: Decoder, compute: ComputeThread) -> SingleProcessBackend:
        return SingleProcessBackend(decoder, optim=OptimSettings(lr=1e-3), compute=compute)

    kept = measure_trainer(CONFIG, make, device=CPU, max_tokens=4096).kept
    parameters = sum(p.numel() for p in Decoder(CONFIG).parameters())
    assert kept.at(5, 512, 0) == pytest.approx(12 * parameters, rel=0.01)


def test_a_small_budget_of_tokens_is_kept() -> None:
    def make(decoder: Decoder, compute: ComputeThread) -> SingleProcessBackend:
        return SingleProcessBackend(
            decoder,
            optim=OptimSettings(lr=1e-3),
            max_tokens_per_micro_batch=128,
            compute=compute,
        )

    small = measure_trainer(CONFIG, make, device=CPU, max_tokens=128).peak
    assert small.layer_token > 0
    # Two sequences in one micro-batch, not one after the other, which would take no more.
    assert small.at(5, 512, 128) > small.at(5, 512, 64)


def test_logits_are_kept_up_to_a_limit() -> None:
    assert logits_bytes(1000, 100, chunk=512, keep=10**9) == 3 * 400_000
    assert logits_bytes(1000, 1000, chunk=100, keep=10**6) == 10**6 + 2 * 400_000
