"""What little trainers say of larger ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from slipstream.loops.footprint import (
    MakeTrainer,
    Trainer,
    logits_bytes,
    measure_trainer,
    one_step,
)
from slipstream.models import decoder as decoders
from slipstream.models import functional
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Decoder
from slipstream.models.lora import LoraConfig, add_lora
from slipstream.training.compute_thread import ComputeThread
from slipstream.training.optim import OptimizerName, OptimSettings
from slipstream.training.single import SingleProcessBackend
from slipstream.types import TrainBatch

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
    optimizer: OptimizerName = "AdamW",
    dtype: torch.dtype = torch.float32,
    *,
    recompute: bool = False,
    rank: int = 0,
) -> MakeTrainer:
    def make(config: ModelConfig, compute: ComputeThread) -> Trainer:
        decoder = Decoder(config)
        decoder.init_weights(0)
        if rank:
            add_lora(decoder, LoraConfig(rank=rank, alpha=rank))
        backend = SingleProcessBackend(
            decoder,
            optim=OptimSettings(lr=1e-3, optimizer=optimizer, weight_decay=0.0),
            dtype=dtype,
            gradient_checkpointing=recompute,
            max_tokens_per_micro_batch=4096,
            compute=compute,
        )

        def step(batch: TrainBatch) -> None:
            backend.forward_backward(batch).wait()
            backend.optim_step().wait()

        return step

    return lambda config, compute: compute.run(lambda: make(config, compute))


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
    make = maker(optimizer, dtype, recompute=recompute, rank=rank)
    foretold = measure_trainer(CONFIG, make, device=CPU, recomputes=recompute)
    small = replace(CONFIG, eos_token_id=None)
    found = one_step(small, make, CPU, rows=8, length=200)
    logits = logits_bytes(512, 1600, chunk=512, keep=600_000_000)
    step = foretold.step(5, 512, 1600, 200, logits=logits)
    assert found.kept + step == pytest.approx(found.peak, rel=0.1)
    assert foretold.kept.at(5, 512, 0) == pytest.approx(found.kept, rel=0.02)


def test_where_scores_are_kept_long_sequences_take_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: without the kernels."""
    for module in (decoders, functional):
        monkeypatch.setattr(module, "has_kernels", lambda *_: False)
    make = maker()
    foretold = measure_trainer(CONFIG, make, device=CPU)
    small = replace(CONFIG, eos_token_id=None)
    for rows, length in ((12, 64), (2, 384)):
        found = one_step(small, make, CPU, rows=rows, length=length)
        logits = logits_bytes(512, rows * length, chunk=512, keep=600_000_000)
        step = foretold.step(5, 512, rows * length, length, logits=logits)
        assert found.kept + step == pytest.approx(found.peak, rel=0.15)


def test_weights_and_adams_moments_are_twelve_bytes_a_parameter() -> None:
    kept = measure_trainer(CONFIG, maker(), device=CPU).kept
    parameters = sum(p.numel() for p in Decoder(CONFIG).parameters())
    assert kept.at(5, 512, 0) == pytest.approx(12 * parameters, rel=0.01)


def test_logits_are_kept_up_to_a_limit() -> None:
    assert logits_bytes(1000, 100, chunk=512, keep=10**9) == 3 * 400_000
    assert logits_bytes(1000, 1000, chunk=100, keep=10**6) == 10**6 + 2 * 400_000
