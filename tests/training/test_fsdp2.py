"""FSDP2 training in two processes against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from slipstream.errors import CheckpointError
from slipstream.models import save_checkpoint
from slipstream.models.policy import load_sharded
from slipstream.models.sharded import full
from slipstream.training import OptimSettings, policy_loss_fn
from slipstream.training.fsdp2 import Ranks, ShardedBackend, shares
from tests.training.helpers import (
    make_batch,
    relative_difference,
    tiny_backend,
    tiny_decoder,
    weights,
)
from tests.training.ranks import on_ranks

LENGTHS = [9, 40, 17, 65, 33, 12, 50]
SETTINGS: dict[str, Any] = {"max_tokens_per_micro_batch": 96, "grad_clip": 0.05}


def optim(name: str) -> OptimSettings:
    return OptimSettings(lr=1e-2, optimizer=name)  # type: ignore[arg-type]


def updates(backend: Any, lengths: list[int], dtype: torch.dtype) -> dict[str, Any]:
    """Run two updates, and return log-probs, metrics, gradients and weights."""
    loss = policy_loss_fn(entropy_coeff=0.02, use_kl_loss=True, kl_loss_coef=0.1)
    out: dict[str, Any] = {"metrics": []}
    for number in range(2):
        batch = make_batch(lengths, seed=number)
        if number == 0:
            out["log_probs"] = backend.compute_log_probs(batch).wait().tolist()
        metrics = backend.forward_backward(batch, loss).wait()
        metrics |= backend.optim_step().wait()
        out["metrics"].append(metrics)
    out["weights"] = weights(backend)
    out["published"] = dict(backend.publish().tensors())
    out["state"] = backend.state_dict()
    return out


def sharded(
    ranks: Ranks, lengths: list[int], dtype: torch.dtype, name: str, settings: dict[str, Any]
) -> dict[str, Any]:
    backend = ShardedBackend(tiny_decoder(), ranks, optim=optim(name), dtype=dtype, **settings)
    local = sum(cast(Any, p).to_local().numel() for p in backend.decoder.parameters())
    return {**updates(backend, lengths, dtype), "local": local}


@pytest.mark.parametrize(
    ("size", "lengths", "dtype", "name", "more"),
    [
        (2, LENGTHS, torch.float32, "AdamW", {}),
        (3, LENGTHS, torch.float32, "Muon", {"gradient_checkpointing": True}),
        (2, [40], torch.float32, "AdamW", {}),
        (2, LENGTHS, torch.bfloat16, "AdamW", {}),
    ],
)
def test_updates_equal_those_of_one_process(
    size: int, lengths: list[int], dtype: torch.dtype, name: str, more: dict[str, Any]
) -> None:
    alone = updates(tiny_backend(optim=optim(name), dtype=dtype, **SETTINGS), lengths, dtype)
    start = {name: p.detach() for name, p in tiny_decoder().named_parameters()}
    found = on_ranks(size, sharded, lengths, dtype, name, {**SETTINGS, **more})
    exact = dtype == torch.float32
    for own in found:
        assert own["log_probs"] == alone["log_probs"]
        for a, b in zip(own["metrics"], alone["metrics"], strict=True):
            assert a == pytest.approx(b, rel=1e-4 if exact else 2e-2, abs=1e-6 if exact else 1e-3)
        moved, wanted = (
            {n: w - start[n] for n, w in each["weights"].items()} for each in (own, alone)
        )
        assert relative_difference(moved, wanted) < (1e-3 if exact else 0.2)
        assert all(torch.equal(own["published"][n], w) for n, w in own["weights"].items())
        for n, entries in alone["state"]["optimizer"]["adamw"].items():
            assert (
                own["state"]["optimizer"]["adamw"][n]["exp_avg"].shape == entries["exp_avg"].shape
            )
    total = sum(w.numel() for w in alone["weights"].values())
    assert sum(own["local"] for own in found) == total


def test_rows_are_distributed_by_token_count() -> None:
    lengths = {0: 5, 1: 100, 2: 50, 3: 49, 4: 2}
    assert shares(lengths, 2) == [[1, 4], [2, 3, 0]]
    assert shares({7: 3}, 3) == [[7], [], []]


def resumed(ranks: Ranks, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Any:
    """Load a state of one process, run one more update, and return the state after it."""
    backend = ShardedBackend(tiny_decoder(seed=5), ranks, optim=optim("AdamW"), **SETTINGS)
    backend.load_weights(tensors).wait()
    backend.load_state_dict(state)
    before = backend.state_dict()
    backend.forward_backward(make_batch(LENGTHS, seed=3)).wait()
    backend.optim_step().wait()
    return before, weights(backend)


def test_state_of_one_process_resumes_in_several() -> None:
    alone = tiny_backend(optim=optim("AdamW"), **SETTINGS)
    updates(alone, LENGTHS, torch.float32)
    state, tensors = alone.state_dict(), weights(alone)
    found = on_ranks(2, resumed, state, tensors)
    alone.forward_backward(make_batch(LENGTHS, seed=3)).wait()
    alone.optim_step().wait()
    for before, after in found:
        for name, entries in state["optimizer"]["adamw"].items():
            for key, value in entries.items():
                assert torch.equal(before["optimizer"]["adamw"][name][key], value)
        assert before["counts"] == state["counts"]
        assert relative_difference(after, weights(alone)) < 1e-5


def poisoned(ranks: Ranks) -> Any:
    """Run an update whose loss is NaN in one process only, and then a finite one."""
    backend = ShardedBackend(tiny_decoder(), ranks, optim=optim("AdamW"), **SETTINGS)
    start = weights(backend)
    batch = make_batch(LENGTHS)
    assert batch.advantages is not None
    batch.advantages[batch.slice_of(3)] = float("nan")
    loss = policy_loss_fn()
    backend.forward_backward(batch, loss).wait()
    skipped = backend.optim_step().wait()["training/skipped_steps"]
    same = all(torch.equal(w, start[n]) for n, w in weights(backend).items())
    backend.forward_backward(make_batch(LENGTHS), loss).wait()
    return skipped, same, backend.optim_step().wait()["training/skipped_steps"]


def test_non_finite_loss_in_one_process_is_skipped_by_all() -> None:
    assert on_ranks(2, poisoned) == [(1.0, True, 1.0)] * 2


def loaded(ranks: Ranks, folder: Path) -> Any:
    """Load a policy sharded; return its tensors, its local size, and the errors of broken ones."""
    device = torch.device("cpu")
    decoder = load_sharded(folder / "good", ranks.mesh, device=device)
    found = {name: full(p.detach()) for name, p in decoder.named_parameters()}
    local = sum(cast(Any, p).to_local().numel() for p in decoder.parameters())
    errors = []
    for name in ("lacks", "strange", "other head"):
        try:
            load_sharded(folder / name, ranks.mesh, device=device)
        except CheckpointError as error:
            errors.append(str(error))
    return found, local, errors


def test_sharded_loading(tmp_path: Path) -> None:
    decoder = tiny_decoder()
    wanted = {name: p.detach().clone() for name, p in decoder.named_parameters()}
    embedding = wanted["model.embed_tokens.weight"]
    for name, more in (
        ("good", {"lm_head.weight": embedding.clone()}),
        ("lacks", {}),
        ("strange", {"model.norm.weight": torch.full((32,), torch.nan)}),
        ("other head", {"lm_head.weight": embedding + 1}),
    ):
        save_checkpoint(decoder, tmp_path / name)
        tensors = {**wanted, **more}
        if name == "lacks":
            del tensors["model.norm.weight"]
        save_file(tensors, tmp_path / name / "model.safetensors")
    parts = on_ranks(2, loaded, tmp_path)
    for found, _, errors in parts:
        assert all(torch.equal(found[name], weight) for name, weight in wanted.items())
        assert [text.split(": ", 1)[1] for text in errors] == [
            "tensor model.norm.weight is missing",
            "tensor model.norm.weight has NaN or infinite values",
            "tensor lm_head.weight is not part of this model",
        ]
    assert sum(local for _, local, _ in parts) == sum(w.numel() for w in wanted.values())
