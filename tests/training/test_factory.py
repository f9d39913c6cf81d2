"""Factory functions for training backends."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from slipstream.errors import CheckpointError
from slipstream.models import save_checkpoint
from slipstream.training import (
    SingleProcessBackend,
    create_adamw_optimizer,
    create_cross_entropy_loss,
    create_pytorch_backend,
    create_warmup_cosine_scheduler,
    load_hf_model,
)
from slipstream.training.columns import train_batch
from slipstream.types import TrainBatch, TrainRow
from tests.training.helpers import tiny_decoder


def counting_batch() -> TrainBatch:
    """Rows in which token n is followed by n + 1, so the previous token predicts the next."""
    starts = random.Random(0).sample(range(40), 8)
    rows = [
        TrainRow(tokens=[s + i for i in range(12)], loss_mask=[0.0] + [1.0] * 11) for s in starts
    ]
    return train_batch(rows)


def test_training_with_single_parts_reduces_the_loss(tmp_path: Path) -> None:
    save_checkpoint(tiny_decoder(), tmp_path)
    model = load_hf_model(tmp_path)
    schedule = create_warmup_cosine_scheduler(warmup_steps=2, total_steps=30, min_lr_ratio=0.1)
    optimizer = create_adamw_optimizer(model, lr=0.01, scheduler=schedule)
    backend = SingleProcessBackend(model, optim=optimizer, metrics_prefix="sft")
    loss = create_cross_entropy_loss()
    losses, rates = [], []

    for _ in range(30):
        losses.append(backend.forward_backward(counting_batch(), loss).wait()["sft/loss"])
        rates.append(backend.optim_step().wait()["sft/lr"])

    assert losses[-1] < 0.2 * losses[0]
    assert rates[:2] == pytest.approx([0.005, 0.01])
    assert rates[-1] < 0.002


def test_create_pytorch_backend_from_a_folder(tmp_path: Path) -> None:
    save_checkpoint(tiny_decoder(), tmp_path)

    backend = create_pytorch_backend(tmp_path, lr=0.01, dtype="float32")
    backend.forward_backward(counting_batch(), create_cross_entropy_loss()).wait()
    metrics = backend.optim_step().wait()
    backend.save_policy(tmp_path / "out")

    assert metrics["actor/lr"] == 0.01
    saved = dict(load_hf_model(tmp_path / "out").named_parameters())
    for name, weight in backend.get_weights().wait().items():
        assert torch.equal(saved[name], weight)
    backend.close()


def test_missing_folder_is_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        create_pytorch_backend(tmp_path / "nowhere")
