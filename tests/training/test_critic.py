"""The critic: values, updates against a reference, resume, and files."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.checkpoint.tree import load_tree, save_tree
from slipstream.errors import CheckpointError, ConfigError, DataError, TrainingError
from slipstream.models.critic_io import load_critic
from slipstream.models.lora import LoraConfig, add_lora, lora_layers, merged_weights
from slipstream.models.value_model import ValueModel
from slipstream.training import OptimSettings
from slipstream.training.columns import train_batch
from slipstream.training.critic import Critic, ValueLossSettings, explained_variance
from slipstream.types import TrainBatch, TrainRow
from tests.training.helpers import VOCAB, as_rows, by_row, relative_difference, tiny_decoder

LENGTHS = [9, 33, 17, 40, 5]
SPLITS: tuple[dict[str, Any], ...] = (
    {},
    {"max_tokens_per_micro_batch": 64},
    {"max_rows_per_micro_batch": 1},
)


def tiny_model(*, head: bool = True, seed: int = 0) -> ValueModel:
    model = ValueModel.of(tiny_decoder(seed=seed))
    if head:
        generator = torch.Generator().manual_seed(seed + 1)
        with torch.no_grad():
            model.score.weight.copy_(0.3 * torch.randn(1, 32, generator=generator))
            model.score.bias.fill_(0.25)
    return model


def critic(model: ValueModel | None = None, **settings: Any) -> Critic:
    settings.setdefault("optim", OptimSettings(lr=1e-3, weight_decay=0.0))
    settings.setdefault("max_tokens_per_micro_batch", 256)
    return Critic(tiny_model() if model is None else model, **settings)


def row(rng: random.Random, length: int, *, prompt: int = 3) -> TrainRow:
    return TrainRow(
        tokens=[rng.randrange(VOCAB) for _ in range(length)],
        loss_mask=[0.0] * prompt + [1.0] * (length - prompt),
        returns=[rng.gauss(0, 1) for _ in range(length)],
        values=[rng.gauss(0, 1) for _ in range(length)],
    )


def batch_of(lengths: list[int], seed: int = 0) -> TrainBatch:
    rng = random.Random(seed)
    return train_batch([row(rng, n) for n in lengths])


def reference_values(model: ValueModel, tokens: list[int]) -> torch.Tensor:
    """V before each token, from a forward pass over this row only, with the head in float64."""
    ids = torch.tensor(tokens + [0] * (-len(tokens) % 16))[None]
    hidden = model.pack(torch.float32).forward(ids, torch.arange(ids.shape[1])[None]).final[0]
    values = hidden.double() @ model.score.weight[0].double() + model.score.bias.double()
    return torch.cat([values.new_zeros(1), values[: len(tokens) - 1]])


def test_values_are_those_of_the_state_before_each_token() -> None:
    batch, work = batch_of(LENGTHS), critic()
    values = work.values(batch).wait()
    for given, got in zip(as_rows(batch), by_row(batch, values), strict=True):
        expected = reference_values(work.model, given.tokens).detach()
        mask = torch.tensor(given.loss_mask).double()
        torch.testing.assert_close(
            torch.tensor(got).double(), expected * mask, atol=1e-5, rtol=1e-5
        )
    # The last token is nobody's state, the first nobody's target.
    others = as_rows(batch)
    for changed in others:
        changed.tokens[-1] = (changed.tokens[-1] + 1) % VOCAB
    assert torch.equal(work.values(train_batch(others)).wait(), values)
    work.close()


def test_new_critic_has_zero_values_and_no_lm_head() -> None:
    policy = tiny_decoder()
    add_lora(policy, LoraConfig(rank=2))
    with torch.no_grad():
        for layer in lora_layers(policy).values():
            layer.lora_B.fill_(0.1)
    model = ValueModel.of(policy)
    merged = merged_weights(policy)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad
        if not name.startswith("score."):
            assert torch.equal(parameter, merged[name])
            assert parameter.data_ptr() != merged[name].data_ptr()
    work = critic(model)
    values = work.values(batch_of(LENGTHS)).wait()
    assert not values.any()
    work.close()


def test_values_do_not_depend_on_the_split(dtype: torch.dtype) -> None:
    batch = batch_of([5, 9, 17, 33, 40, 64, 21, 12])
    results = []
    for limits in SPLITS:
        work = critic(dtype=dtype, **limits)
        results.append(work.values(batch).wait().tolist())
        work.close()
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_update_equals_a_reference_for_any_split(mode: str) -> None:
    batch = batch_of(LENGTHS)
    model = tiny_model()
    total = torch.zeros((), dtype=torch.float64)
    clipped_tokens, tokens = 0, batch.num_target_tokens
    for given in as_rows(batch):
        assert given.returns is not None
        assert given.values is not None
        targets = [t for t in range(1, len(given.tokens)) if given.loss_mask[t]]
        values, line = reference_values(model, given.tokens), torch.zeros((), dtype=torch.float64)
        for t in targets:
            old, goal = given.values[t], given.returns[t]
            plain = (values[t] - goal) ** 2
            within = (values[t].clamp(old - 0.2, old + 0.2) - goal) ** 2
            clipped_tokens += bool(within > plain)
            line = line + torch.maximum(plain, within)
        weight = {
            "token-mean": tokens,
            "seq-mean-token-sum": len(batch),
            "seq-mean-token-mean": len(batch) * len(targets),
        }[mode]
        total = total + 0.5 * line / weight
    loss = float(total.detach())
    total.backward()  # type: ignore[no-untyped-call]
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert "score.weight" in expected
    assert "model.embed_tokens.weight" in expected

    settings = ValueLossSettings(cliprange_value=0.2, loss_agg_mode=mode)
    for limits in SPLITS:
        work = critic(loss=settings, grad_clip=None, **limits)
        metrics = work.update(batch).wait()
        assert metrics["critic/vf_loss"] == pytest.approx(loss, rel=1e-5)
        assert metrics["critic/vf_clipfrac"] == pytest.approx(clipped_tokens / tokens)
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in expected.values()))
        assert metrics["critic/grad_norm"] == pytest.approx(norm, rel=1e-5)
        state = work.state_dict()["optimizer"]["adamw"]
        got = {name: entries["exp_avg"] / 0.1 for name, entries in state.items()}
        assert relative_difference(got, expected) < 1e-5
        work.close()


def test_masked_entries_do_not_matter() -> None:
    clean, dirty = batch_of(LENGTHS), batch_of(LENGTHS)
    assert dirty.returns is not None
    assert dirty.values is not None
    dirty.returns[dirty.loss_mask == 0] = math.nan
    dirty.values[dirty.loss_mask == 0] = math.inf
    one, other = critic(), critic()
    assert one.update(clean).wait() == other.update(dirty).wait()
    for (_, a), (_, b) in zip(
        one.model.named_parameters(), other.model.named_parameters(), strict=True
    ):
        assert torch.equal(a, b)
    one.close()
    other.close()


def learn(work: Critic, batch: TrainBatch, steps: int) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for _ in range(steps):
        batch.values = work.values(batch).wait()
        metrics = work.update(batch).wait()
    return metrics


def test_learns_a_constant() -> None:
    batch = batch_of([12, 20, 28])
    batch.returns = torch.full((batch.num_tokens,), 1.5)
    work = critic(tiny_model(head=False), optim=OptimSettings(lr=1e-2, weight_decay=0.0))
    learn(work, batch, 60)
    for line in by_row(batch, work.values(batch).wait()):
        assert line[3:] == pytest.approx([1.5] * (len(line) - 3), abs=0.1)
    work.close()


def test_learns_a_linear_function_of_the_hidden_state() -> None:
    teacher = critic(tiny_model())
    batch = batch_of([24, 40, 33])
    batch.returns = teacher.values(batch).wait()
    work = critic(tiny_model(head=False), optim=OptimSettings(lr=1e-2, weight_decay=0.0))
    first = learn(work, batch, 1)
    assert explained_variance(batch) == pytest.approx(0.0, abs=1e-4)
    last = learn(work, batch, 100)
    batch.values = work.values(batch).wait()
    assert (explained_variance(batch) or 0.0) > 0.97
    assert last["critic/vf_loss"] < 0.03 * first["critic/vf_loss"]
    teacher.close()
    work.close()


def test_explained_variance_matches_a_computation_by_hand() -> None:
    given = TrainRow(
        tokens=[1, 2, 3, 4],
        loss_mask=[1.0, 1.0, 0.0, 1.0],
        returns=[9.0, 1.0, 9.0, 3.0],
        values=[9.0, 0.0, 9.0, 3.0],
    )
    # Returns 1 and 3 have variance 2, errors 1 and 0 have 0.5; column 0 is no target.
    assert explained_variance(train_batch([given])) == pytest.approx(1 - 0.5 / 2.00001)
    given.loss_mask = [0.0, 1.0, 0.0, 0.0]
    assert explained_variance(train_batch([given])) is None


def test_metrics() -> None:
    batch, work = batch_of(LENGTHS), critic()
    metrics = work.update(batch).wait()
    assert metrics.keys() == {
        "critic/vf_loss",
        "critic/vf_clipfrac",
        "critic/vpred_mean",
        "critic/grad_norm",
        "critic/lr",
        "critic/skipped_steps",
    }
    values = critic().values(batch).wait()
    mean = float(values.sum()) / batch.num_target_tokens
    assert metrics["critic/vpred_mean"] == pytest.approx(mean, rel=1e-5)
    assert metrics["critic/lr"] == 1e-3
    work.close()


def test_values_equal_transformers_and_files_round_trip(tmp_path: Path) -> None:
    from transformers import AutoModelForTokenClassification

    batch, work = batch_of(LENGTHS), critic()
    work.update(batch).wait()
    values = work.values(batch).wait()
    work.save(tmp_path / "critic")
    theirs = AutoModelForTokenClassification.from_pretrained(
        str(tmp_path / "critic"), dtype=torch.float32
    ).eval()
    assert theirs.config.num_labels == 1
    for given, line in zip(as_rows(batch), by_row(batch, values), strict=True):
        with torch.no_grad():
            logits = theirs(torch.tensor(given.tokens)[None]).logits[0, :, 0]
        torch.testing.assert_close(torch.tensor(line[3:]), logits[2:-1], atol=1e-5, rtol=1e-5)
    again = critic(load_critic(tmp_path / "critic"))
    assert torch.equal(again.values(batch).wait(), values)
    theirs.save_pretrained(str(tmp_path / "theirs"))
    third = critic(load_critic(tmp_path / "theirs"))
    assert torch.equal(third.values(batch).wait(), values)
    for part in (work, again, third):
        part.close()


@pytest.mark.parametrize("optimizer", ["AdamW", "Muon"])
def test_resume_is_bitwise_equal(optimizer: Any, tmp_path: Path) -> None:
    optim = OptimSettings(
        lr=1e-2, optimizer=optimizer, schedule="cosine", warmup_steps=1, total_steps=9
    )
    straight, stopped = critic(optim=optim), critic(optim=optim)
    for seed in range(4):
        straight.update(batch_of(LENGTHS, seed)).wait()
    for seed in range(2):
        stopped.update(batch_of(LENGTHS, seed)).wait()
    stopped.save(tmp_path / "critic")
    save_tree(tmp_path / "state.safetensors", stopped.state_dict())
    resumed = critic(load_critic(tmp_path / "critic"), optim=optim)
    resumed.load_state_dict(load_tree(tmp_path / "state.safetensors"))
    metrics = {}
    for seed in range(2, 4):
        metrics = resumed.update(batch_of(LENGTHS, seed)).wait()
    assert metrics["critic/lr"] < 1e-2
    theirs = dict(straight.model.named_parameters())
    for name, parameter in resumed.model.named_parameters():
        assert torch.equal(parameter, theirs[name]), name
    with pytest.raises(CheckpointError, match="'optimizer' is missing"):
        resumed.load_state_dict({})
    for work in (straight, stopped, resumed):
        work.close()


def test_gradient_checkpointing_changes_no_bit() -> None:
    batch = batch_of(LENGTHS)
    one, other = critic(), critic(gradient_checkpointing=True)
    assert one.update(batch).wait() == other.update(batch).wait()
    one.close()
    other.close()


def test_non_finite_updates_are_skipped_and_counted() -> None:
    work = critic(max_nonfinite_steps=1)
    before = {n: p.detach().clone() for n, p in work.model.named_parameters()}
    batch = batch_of(LENGTHS)
    assert batch.returns is not None
    batch.returns[4] = math.inf
    assert work.update(batch).wait()["critic/skipped_steps"] == 1.0
    with pytest.raises(TrainingError, match="returns or recorded values in the batch"):
        work.update(batch).wait()
    for name, parameter in work.model.named_parameters():
        assert torch.equal(parameter, before[name])
    work.close()


@pytest.mark.parametrize("missing", ["returns", "values"])
def test_rejects_a_row_without_a_column(missing: str) -> None:
    work, batch = critic(), batch_of(LENGTHS)
    setattr(batch, missing, None)
    with pytest.raises(DataError, match=f"the batch has no {missing}"):
        work.update(batch).wait()
    rows = as_rows(batch_of(LENGTHS))
    setattr(rows[1], missing, None)
    with pytest.raises(DataError, match=f"row 1 has no {missing}"):
        train_batch(rows)
    rows = as_rows(batch_of(LENGTHS))
    getattr(rows[2], missing).pop()
    with pytest.raises(DataError, match=f"{missing} has 16 entries for 17"):
        train_batch(rows)
    batch = batch_of(LENGTHS)
    setattr(batch, missing, torch.zeros(103))
    with pytest.raises(DataError, match=f"{missing} has 103 entries for 104 tokens"):
        work.update(batch).wait()
    # A rejected update changes nothing.
    assert work.update(batch_of(LENGTHS)).wait()["critic/grad_norm"] > 0
    work.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cliprange_value": 0.0}, "critic.cliprange_value=0.0 must be > 0"),
        ({"loss_agg_mode": "mean"}, "critic.loss_agg_mode=mean is unknown"),
        ({"loss_agg_mode": "seq-mean-token-sum-norm"}, "divides by a constant length"),
    ],
)
def test_rejects_impossible_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ValueLossSettings(**settings)
