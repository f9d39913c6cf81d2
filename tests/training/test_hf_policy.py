"""Training of an HF policy: log-probs, updates and published weights."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from slipstream.errors import CheckpointError, TrainingError
from slipstream.inference.hf import HFCore
from slipstream.models.hf_policy import HFPolicy, load_hf_policy
from slipstream.training import OptimSettings, SingleProcessBackend, sft_loss
from slipstream.training.columns import train_batch
from slipstream.types import SamplingParams, TrainBatch
from tests.models.foreign import KINDS, save_foreign
from tests.models.helpers import load_theirs
from tests.training.helpers import as_rows, by_row, make_row, tiny_backend
from tests.training.test_single import RecordingSink

TEMPERATURE = 0.7


def batch_of(*lengths: int) -> TrainBatch:
    rng = random.Random(0)
    return train_batch([make_row(rng, n) for n in lengths], temperature=TEMPERATURE)


def backend_of(folder: Path, **settings: object) -> tuple[SingleProcessBackend, HFPolicy]:
    model = load_hf_policy(folder)
    return tiny_backend(model, optim=OptimSettings(lr=1e-2), **settings), model  # type: ignore[arg-type]


@torch.no_grad()
def next_token_log_probs(folder: Path, batch: TrainBatch) -> list[torch.Tensor]:
    """Log-probs (T, V) of the next token for each row, each row computed alone."""
    model = load_theirs(folder)
    return [
        (model(input_ids=torch.tensor([row.tokens])).logits[0] / batch.temperature).log_softmax(-1)
        for row in as_rows(batch)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_equal_transformers(kind: str, tmp_path: Path) -> None:
    save_foreign(kind, tmp_path)
    batch = batch_of(9, 40, 17, 65, 33)
    expected = next_token_log_probs(tmp_path, batch)
    for settings in (
        {"max_tokens_per_micro_batch": 400},
        {"max_rows_per_micro_batch": 1, "log_prob_chunk": 8},
    ):
        backend, _ = backend_of(tmp_path, **settings)
        found = by_row(batch, backend.compute_log_probs(batch).wait())
        squares = by_row(batch, backend.compute_sum_pi_squared(batch).wait())
        kept = backend.compute_kept_ids(batch, SamplingParams(max_tokens=1, top_k=5)).wait()
        backend.close()
        for r, (row, law) in enumerate(zip(as_rows(batch), expected, strict=True)):
            for t in range(1, len(row.tokens)):
                if not row.loss_mask[t]:
                    assert found[r][t] == squares[r][t] == len(kept[r][t]) == 0
                    continue
                own = law[t - 1]
                assert found[r][t] == pytest.approx(float(own[row.tokens[t]]), abs=1e-4)
                assert squares[r][t] == pytest.approx(float(own.exp().square().sum()), abs=1e-4)
                assert set(kept[r][t]) == set(own.topk(5).indices.tolist())


def test_full_kl_equals_that_of_the_distributions(tmp_path: Path) -> None:
    save_foreign("gpt2", tmp_path / "own")
    save_foreign("gemma2", tmp_path / "other")
    batch = batch_of(9, 30)
    backend, _ = backend_of(tmp_path / "own")
    backend.use_full_kl(load_hf_policy(tmp_path / "other"))
    found = by_row(batch, backend.compute_full_kl(batch, "reverse").wait())
    backend.close()
    own, other = (
        next_token_log_probs(tmp_path / "own", batch),
        next_token_log_probs(tmp_path / "other", batch),
    )
    for row, values, p, q in zip(as_rows(batch), found, own, other, strict=True):
        kl = (p.exp() * (p - q)).sum(-1)
        for t in range(1, len(row.tokens)):
            wanted = float(kl[t - 1]) if row.loss_mask[t] else 0.0
            assert values[t] == pytest.approx(wanted, abs=1e-4)


def test_updates_reach_an_engine_and_resume_is_bitwise_equal(tmp_path: Path) -> None:
    save_foreign("mixtral", tmp_path / "start")
    backend, model = backend_of(tmp_path / "start")
    core = HFCore(model.copy_as(torch.float32), max_model_len=100)
    # With so few tokens some experts get none.
    small = batch_of(4)
    losses = []
    for number in range(4):
        if number == 2:
            backend.save_policy(tmp_path / "half")
            state = backend.state_dict()
        losses.append(backend.forward_backward(small, sft_loss()).wait()["sft/loss"])
        backend.optim_step().wait()
    assert losses[3] < losses[0]
    core.update_weights(backend.publish())
    assert core.stats().version == 1
    sent = dict(core._model.named_parameters())
    assert all(torch.equal(sent[name], p) for name, p in model.named_parameters())
    again, other = backend_of(tmp_path / "half")
    again.load_state_dict(state)
    for _ in range(2):
        again.forward_backward(small, sft_loss()).wait()
        again.optim_step().wait()
    ours = dict(model.weights())
    assert all(torch.equal(ours[name], tensor) for name, tensor in other.weights())
    taken = again.get_weights().wait()
    assert taken.keys() == ours.keys()
    again.load_weights({name: tensor * 2 for name, tensor in taken.items()}).wait()
    assert all(torch.equal(ours[name] * 2, tensor) for name, tensor in other.weights())
    with pytest.raises(CheckpointError, match=r"load_weights: tensor lm_head\.weight is missing"):
        again.load_weights({n: t for n, t in taken.items() if n != "lm_head.weight"}).wait()
    backend.close()
    again.close()


def test_rejects_a_feature_sink(tmp_path: Path) -> None:
    backend, _ = backend_of(save_foreign("gpt2", tmp_path))
    with pytest.raises(TrainingError, match=r"this gpt2 .*without a sink"):
        backend.compute_log_probs(batch_of(9), sink=RecordingSink({0})).wait()
    backend.close()
