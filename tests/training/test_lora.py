"""Training of a LoRA adapter: gradients equal to peft's, resume, publishing and the reference."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.checkpoint.tree import load_tree, save_tree
from slipstream.errors import CheckpointError, TrainingError
from slipstream.models import Decoder, save_checkpoint
from slipstream.models.lora import LoraConfig, add_lora, lora_layers
from slipstream.models.lora_io import load_adapter, save_adapter
from slipstream.training import OptimSettings, SingleProcessBackend
from slipstream.training.factory import create_pytorch_backend
from slipstream.training.lora import BaseWeights
from tests.models.helpers import load_theirs
from tests.training.helpers import (
    as_rows,
    assert_same,
    gradients,
    make_batch,
    relative_difference,
    tiny_backend,
    tiny_decoder,
    weights,
)

LENGTHS = [9, 33, 17, 40]


def adapted(rank: int = 3, alpha: float = 6.0, *, seed: int = 0, **more: Any) -> Decoder:
    """A decoder with an adapter whose B is not zero, so that A has a gradient."""
    decoder = tiny_decoder(seed=seed)
    add_lora(decoder, LoraConfig(rank=rank, alpha=alpha, **more), seed=7)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for layer in lora_layers(decoder).values():
            layer.lora_B.copy_(0.1 * torch.randn(layer.lora_B.shape, generator=generator))
    return decoder


def base_of(decoder: Decoder) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in decoder.named_parameters() if not p.requires_grad}


def step(backend: SingleProcessBackend, seed: int = 0) -> dict[str, float]:
    metrics = backend.forward_backward(make_batch(LENGTHS, seed=seed, policy=False)).wait()
    return metrics | backend.optim_step().wait()


def test_gradients_equal_peft(tmp_path: Path) -> None:
    from peft import PeftModel

    decoder = adapted()
    save_checkpoint(tiny_decoder(), tmp_path / "base")
    save_adapter(decoder, tmp_path / "adapter")
    model = PeftModel.from_pretrained(
        load_theirs(tmp_path / "base"), str(tmp_path / "adapter"), is_trainable=True
    )
    batch = make_batch(LENGTHS, policy=False)
    total = torch.zeros(())
    for row in as_rows(batch):
        ids = torch.tensor(row.tokens)
        logits = model(ids[None]).logits[0, :-1].float()
        chosen = torch.log_softmax(logits, -1).gather(-1, ids[1:, None])[:, 0]
        total = total - (chosen * torch.tensor(row.loss_mask[1:])).sum()
    (total / batch.num_target_tokens).backward()  # type: ignore[no-untyped-call]
    theirs = {
        name.removeprefix("base_model.model.").replace(".default.weight", ""): p.grad
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    backend = tiny_backend(decoder, max_tokens_per_micro_batch=64)
    backend.forward_backward(batch).wait()
    ours = gradients(backend)
    backend.close()
    assert len(ours) == 2 * 2 * 7
    assert all(float(g.abs().max()) > 0 for g in ours.values())
    assert relative_difference(ours, theirs) < 1e-5
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], atol=2e-6, rtol=1e-3)


def test_only_a_and_b_change_and_have_optimizer_state() -> None:
    decoder = adapted()
    before = copy.deepcopy(dict(decoder.named_parameters()))
    backend = tiny_backend(decoder, optim=OptimSettings(lr=1e-2))
    losses = [step(backend)["sft/loss"] for _ in range(12)]
    assert losses[-1] < losses[0] - 0.1
    for name, parameter in decoder.named_parameters():
        assert torch.equal(parameter, before[name]) == ("lora_" not in name), name
    state = backend.state_dict()
    assert state["optimizer"]["adamw"].keys() == state["lora"]["tensors"].keys()
    assert len(state["lora"]["tensors"]) == 28
    backend.close()


@pytest.mark.parametrize("optimizer", ["AdamW", "Muon"])
def test_resume_is_bitwise_equal(optimizer: Any, tmp_path: Path) -> None:
    optim = OptimSettings(
        lr=1e-2, optimizer=optimizer, schedule="linear", warmup_steps=1, total_steps=9
    )
    straight = tiny_backend(adapted(), optim=optim)
    for seed in range(4):
        step(straight, seed)
    stopped = tiny_backend(adapted(), optim=optim)
    for seed in range(2):
        step(stopped, seed)
    save_tree(tmp_path / "state.safetensors", stopped.state_dict())
    decoder = tiny_decoder()
    add_lora(decoder, LoraConfig(rank=3, alpha=6.0), seed=99)
    resumed = tiny_backend(decoder, optim=optim)
    resumed.load_state_dict(load_tree(tmp_path / "state.safetensors"))
    for seed in range(2, 4):
        step(resumed, seed)
    assert_same(dict(straight.decoder.named_parameters()), dict(decoder.named_parameters()))
    assert_same(weights(straight), weights(resumed))
    for backend in (straight, stopped, resumed):
        backend.close()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: tiny_decoder(), "LoRA adapter of rank 3"),
        (lambda: adapted(rank=2), "lora_rank=3, but this run has 2"),
        (lambda: adapted(alpha=8.0), "lora_alpha=6, but this run has 8"),
        (lambda: adapted(target_modules=("q_proj",)), "disagree about"),
        (lambda: adapted(seed=1), "other base weights"),
    ],
)
def test_rejects_the_state_of_another_adapter(other: Any, message: str) -> None:
    backend, decoder = tiny_backend(adapted()), other()
    before = base_of(decoder)
    state, target = backend.state_dict(), tiny_backend(decoder)
    with pytest.raises(CheckpointError, match=message):
        target.load_state_dict(state)
    assert_same(before, base_of(decoder))
    backend.close()
    target.close()


def test_adapter_rejects_the_state_of_all_weights() -> None:
    backend, target = tiny_backend(), tiny_backend(adapted())
    with pytest.raises(CheckpointError, match="lora_rank=0"):
        target.load_state_dict(backend.state_dict())
    backend.close()
    target.close()


def test_published_weights_are_merged_and_give_bitwise_equal_log_probs(dtype: torch.dtype) -> None:
    backend = tiny_backend(adapted(), dtype=dtype)
    step(backend)
    batch = make_batch([20, 37], seed=1)
    ours = backend.compute_log_probs(batch).wait()
    published = dict(backend.publish().tensors())
    assert_same(published, weights(backend))
    plain = tiny_decoder(seed=4)
    own = dict(plain.named_parameters())
    assert published.keys() == own.keys()
    other = tiny_backend(plain, dtype=dtype)
    other.load_weights(published).wait()
    assert torch.equal(other.compute_log_probs(batch).wait(), ours)
    # Those that the update works with, too.
    batch.rollout_log_probs = ours
    metrics = backend.forward_backward(batch).wait()
    assert metrics["training/rollout_log_probs_bitwise_equal"] == 1.0
    backend.close()
    other.close()


def test_published_update_keeps_its_values() -> None:
    backend = tiny_backend(adapted(), optim=OptimSettings(lr=0.1))
    before = weights(backend)
    update = backend.publish()
    step(backend)
    assert_same(dict(update.tensors()), before)
    assert any(not torch.equal(before[n], w) for n, w in weights(backend).items())
    backend.close()


def test_reference_is_the_base_weights(dtype: torch.dtype) -> None:
    backend, plain = tiny_backend(adapted(), dtype=dtype), tiny_backend(dtype=dtype)
    reference = BaseWeights(backend)
    batch = make_batch(LENGTHS)
    expected = plain.compute_log_probs(batch).wait()
    assert torch.equal(reference.compute_log_probs(batch).wait(), expected)
    own = backend.compute_log_probs(batch).wait()
    assert not torch.equal(own, expected)
    step(backend)
    assert torch.equal(reference.compute_log_probs(batch).wait(), expected)
    assert not torch.equal(backend.compute_log_probs(batch).wait(), own)
    with pytest.raises(TrainingError, match="no base weights"):
        BaseWeights(plain).compute_log_probs(batch).wait()
    backend.close()
    plain.close()


def test_adapter_is_active_again_after_a_failing_reference() -> None:
    backend = tiny_backend(adapted())
    batch = make_batch(LENGTHS)
    own = backend.compute_log_probs(batch).wait()
    bad = make_batch([5])
    bad.tokens[0] = 10_000
    with pytest.raises(ValueError, match="vocabulary"):
        BaseWeights(backend).compute_log_probs(bad).wait()
    assert torch.equal(backend.compute_log_probs(batch).wait(), own)
    backend.close()


def test_load_weights_is_rejected_with_an_adapter() -> None:
    backend = tiny_backend(adapted())
    with pytest.raises(TrainingError, match="trains a LoRA adapter"):
        backend.load_weights(weights(backend)).wait()
    backend.close()


def test_saved_adapter_continues_equally(tmp_path: Path) -> None:
    backend = tiny_backend(adapted())
    step(backend)
    backend.save_adapter(tmp_path / "adapter")
    decoder = tiny_decoder()
    load_adapter(decoder, tmp_path / "adapter")
    again = tiny_backend(decoder)
    assert_same(weights(again), weights(backend))
    again.close()
    full = tiny_backend()
    full.save_adapter(tmp_path / "none")
    assert not (tmp_path / "none").exists()
    full.close()
    backend.close()


def test_create_pytorch_backend_with_lora() -> None:
    backend = create_pytorch_backend(
        tiny_decoder(), lr=1e-2, dtype="float32", lora=LoraConfig(rank=2)
    )
    assert step(backend)["actor/grad_norm"] > 0
    assert sum(p.requires_grad for p in backend.decoder.parameters()) == 28
    backend.close()
