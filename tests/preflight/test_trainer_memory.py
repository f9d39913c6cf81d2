"""Tests of the predicted memory of trainers against the measured memory of larger trainers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from slipstream.models import decoder as decoders
from slipstream.models import functional
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Decoder
from slipstream.models.lora import LoraConfig, add_lora
from slipstream.preflight.trainer_memory import MakeTrainer, logits_bytes, measure_trainer, one_step
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
    max_position_embeddings=512,
    eos_token_id=3,
)


def maker(
    optimizer: OptimizerName = "AdamW", dtype: torch.dtype = torch.float32, *, rank: int = 0
) -> MakeTrainer:
    def make(config: ModelConfig, compute: ComputeThread, recompute: bool) -> SingleProcessBackend:
        def make_on_thread() -> SingleProcessBackend:
            decoder = Decoder(config)
            decoder.init_weights(0)
            if rank:
                add_lora(decoder, LoraConfig(rank=rank, alpha=rank))
            return SingleProcessBackend(
                decoder,
                optim=OptimSettings(lr=1e-3, optimizer=optimizer, weight_decay=0.0),
                dtype=dtype,
                gradient_checkpointing=recompute,
                max_tokens_per_micro_batch=8192,
                compute=compute,
            )

        return compute.run(make_on_thread)

    return make


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
@pytest.mark.parametrize(("rows", "length"), [(2, 16), (20, 200)])
def test_predicted_memory_matches_a_larger_trainer(
    optimizer: OptimizerName, dtype: torch.dtype, recompute: bool, rank: int, rows: int, length: int
) -> None:
    """With few tokens, most of the memory is gradients; with many tokens, it is activations."""
    make = maker(optimizer, dtype, rank=rank)
    predicted = measure_trainer(CONFIG, make, device=CPU, recomputes=recompute)
    small = replace(CONFIG, eos_token_id=None)
    found = one_step(small, make, CPU, rows=rows, length=length, recomputes=recompute)
    logits = logits_bytes(512, rows * length, chunk=512, keep=600_000_000)
    step = predicted.step(5, 512, rows * length, length, logits=logits)
    assert found.kept + step == pytest.approx(found.kept + found.peak, rel=0.15)
    assert predicted.kept.at(5, 512) == pytest.approx(found.kept, rel=0.02)


def test_predicted_memory_without_kernels_includes_attention_scores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the CPU kernels, as on a GPU, attention stores its scores."""
    for module in (decoders, functional):
        monkeypatch.setattr(module, "has_kernels", lambda *_: False)
    predicted = measure_trainer(CONFIG, maker(), device=CPU)
    small = replace(CONFIG, eos_token_id=None)
    for rows, length in ((12, 64), (2, 384)):
        found = one_step(small, maker(), CPU, rows=rows, length=length)
        logits = logits_bytes(512, rows * length, chunk=512, keep=600_000_000)
        step = predicted.step(5, 512, rows * length, length, logits=logits)
        assert found.kept + step == pytest.approx(found.kept + found.peak, rel=0.2)


def test_weights_and_adam_moments_need_12_bytes_per_parameter_and_gradients_4() -> None:
    found = measure_trainer(CONFIG, maker(), device=CPU)
    parameters = sum(p.numel() for p in Decoder(CONFIG).parameters())
    assert found.kept.at(5, 512) == pytest.approx(12 * parameters, rel=0.01)
    assert found.gradients.at(5, 512) == pytest.approx(4 * parameters, rel=0.01)


def test_logits_bytes_kept_for_the_backward_pass_are_limited() -> None:
    assert logits_bytes(1000, 100, chunk=512, keep=10**9) == 3 * 400_000
    assert logits_bytes(1000, 1000, chunk=100, keep=10**6) == 10**6 + 2 * 400_000
