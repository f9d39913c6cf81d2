"""Every registered loss against `reference`, and properties of all losses."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.algorithms import (
    LossAggMode,
    Normalizers,
    PolicyLossConfig,
    PolicyLossModeConfig,
    get_policy_loss_fn,
    policy_loss_names,
)
from slipstream.algorithms.losses.common import token_terms
from tests.algorithms.losses.helpers import (
    BOUNDS,
    CONFIG,
    HORIZON,
    SHARE,
    make_batch,
    run,
    takes_weights,
    with_selection,
)
from tests.algorithms.losses.reference import Settings, reference, select

NAMES = policy_loss_names()
MODES = list(LossAggMode)


def settings_for(name: str, seed: int) -> Settings:
    batch = make_batch(seed)
    settings = Settings(low=0.2, high=0.28, horizon=HORIZON)
    if name in ("clip_cov", "kl_cov"):
        settings.selected = select(
            name,
            batch.old.tolist(),
            batch.new.tolist(),
            batch.advantages.tolist(),
            batch.mask.tolist(),
            settings,
            share=SHARE,
            bounds=BOUNDS,
            hashes=batch.hashes.tolist(),
        )
        assert len(settings.selected) > 1
    return settings


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("weighted", [False, True])
def test_loss_gradient_and_clip_fractions_equal_the_reference(
    name: str, mode: LossAggMode, weighted: bool
) -> None:
    weighted = weighted and takes_weights(name)
    for seed in range(3):
        batch = make_batch(seed)
        expected = reference(
            name,
            batch.old.tolist(),
            batch.new.tolist(),
            batch.advantages.tolist(),
            batch.mask.tolist(),
            mode,
            settings_for(name, seed),
            batch.weights.tolist() if weighted else None,
        )
        loss, grad, metrics = run(name, batch, mode, with_selection(name, batch), weighted=weighted)
        assert loss == pytest.approx(expected.loss, rel=1e-12)
        torch.testing.assert_close(
            grad, torch.tensor(expected.grad, dtype=torch.float64), rtol=1e-11, atol=1e-14
        )
        assert float(grad.abs().sum()) > 0
        if "actor/pg_clipfrac" in metrics:
            assert metrics["actor/pg_clipfrac"] == pytest.approx(expected.clipped)
            assert metrics["actor/pg_clipfrac_lower"] == pytest.approx(expected.clipped_lower)
        if "actor/ppo_kl" in metrics:
            gap = torch.where(batch.mask != 0, batch.old - batch.new, 0.0)
            gap = gap.abs() if name == "kl_cov" else gap
            mean = float(gap.sum() / batch.mask.sum())
            assert metrics["actor/ppo_kl"] == pytest.approx(mean)


@pytest.mark.parametrize(
    "name", ["vanilla", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "dro"]
)
def test_gradcheck_of_losses_without_stopped_gradients(name: str) -> None:
    batch = make_batch(11, rows=3, length=3)
    config = with_selection(name, batch)
    old, new, advantages = (torch.nan_to_num(c) for c in (batch.old, batch.new, batch.advantages))
    fn = get_policy_loss_fn(name)
    assert torch.autograd.gradcheck(
        lambda z: fn(old, z, advantages, batch.mask, "token-mean", config)[0],
        new.clone().requires_grad_(),
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_loss_is_the_policy_gradient_on_policy(name: str) -> None:
    batch = make_batch(5)
    batch = replace(batch, old=batch.new, advantages=torch.where(batch.mask != 0, 1.5, 0.0))
    config = replace(CONFIG, selected=torch.zeros(6, 5, dtype=torch.bool))
    mode = "seq-mean-token-mean"
    expected = run("gpg", batch, mode, config, weighted=False)[1]
    torch.testing.assert_close(run(name, batch, mode, config, weighted=False)[1], expected)


@pytest.mark.parametrize("name", NAMES)
def test_rejects_a_batch_without_target_tokens(name: str) -> None:
    zeros = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="num_tokens of a mini-batch must be > 0, got 0"):
        get_policy_loss_fn(name)(zeros, zeros, zeros, zeros, "token-mean", CONFIG)


@pytest.mark.parametrize("name", NAMES)
def test_micro_batch_without_target_tokens_adds_nothing(name: str) -> None:
    nan = torch.full((2, 3), torch.nan)
    leaf = nan.clone().requires_grad_()
    config = replace(
        CONFIG,
        normalizers=Normalizers(num_tokens=4, num_sequences=2, horizon=3),
        selected=torch.zeros(2, 3, dtype=torch.bool),
    )
    loss, metrics = get_policy_loss_fn(name)(
        nan, leaf, nan, torch.zeros(2, 3), "token-mean", config
    )
    (grad,) = torch.autograd.grad(loss, leaf)
    assert loss.item() == 0.0
    assert grad.tolist() == [[0.0] * 3] * 2
    assert all(float(value) == 0.0 for value in metrics.values())


@pytest.mark.parametrize("name", NAMES)
def test_rejects_shapes_that_would_broadcast(name: str) -> None:
    one = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"tensors of one shape, got .*'advantages': \(2, 1\)"):
        get_policy_loss_fn(name)(one, one, one[:, :1], one, "token-mean", CONFIG)


@pytest.mark.parametrize("name", ["geo_mean", "gspo", "sapo"])
def test_losses_over_sequences_ignore_the_aggregation_mode(name: str) -> None:
    batch = make_batch(7)
    losses = {run(name, batch, mode)[0] for mode in MODES}
    assert len(losses) == 1


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("geo_mean", "gspo", "sapo")])
def test_rejects_unknown_aggregation_modes(name: str) -> None:
    with pytest.raises(ValueError, match="unknown loss_agg_mode 'mean'; known: token-mean"):
        run(name, make_batch(1), "mean")


@pytest.mark.parametrize("name", NAMES)
def test_float32_is_close_to_float64(name: str) -> None:
    high, low = make_batch(3), make_batch(3, dtype=torch.float32)
    config = with_selection(name, high)
    loss, grad, _ = run(name, high, config=config)
    loss_low, grad_low, _ = run(name, low, config=config)
    assert loss_low == pytest.approx(loss, rel=2e-6)
    torch.testing.assert_close(grad_low.double(), grad, rtol=2e-6, atol=1e-7)


def test_bypass_reinforce_equals_its_reference() -> None:
    batch = make_batch(4)
    config = replace(CONFIG, policy_loss=PolicyLossModeConfig(loss_type="reinforce"))
    for mode in MODES:
        expected = reference(
            "gpg",
            batch.old.tolist(),
            batch.new.tolist(),
            batch.advantages.tolist(),
            batch.mask.tolist(),
            mode,
            Settings(horizon=HORIZON),
            batch.weights.tolist(),
        )
        leaf = batch.new.clone().requires_grad_()
        loss, _ = get_policy_loss_fn("bypass_mode")(
            batch.old, leaf, batch.advantages, batch.mask, mode, config, batch.weights
        )
        (grad,) = torch.autograd.grad(loss, leaf)
        assert loss.item() == pytest.approx(expected.loss, rel=1e-12)
        torch.testing.assert_close(
            grad, torch.tensor(expected.grad, dtype=torch.float64), rtol=1e-11, atol=1e-14
        )


def as_verl(config: PolicyLossConfig, counts: dict[str, Any]) -> dict[str, Any]:
    """Settings as in VERL's files, with unset entries as null and one more section."""
    values = {f.name: getattr(config, f.name) for f in fields(config)}
    values["policy_loss"] = {
        f.name: getattr(config.policy_loss, f.name) for f in fields(config.policy_loss)
    }
    del values["normalizers"]
    return values | {"global_batch_info": counts, "tau_neg": None, "strategy": "fsdp"}


@pytest.mark.parametrize("name", NAMES)
def test_accepts_verls_settings(name: str) -> None:
    batch = make_batch(2)
    config = with_selection(name, batch)
    given = as_verl(config, {})
    expected = run(name, batch, config=config)
    for other in (given, SimpleNamespace(**given)):
        loss, grad, metrics = run(name, batch, config=other)  # type: ignore[arg-type]
        assert (loss, metrics) == (expected[0], expected[2])
        assert torch.equal(grad, expected[1])


@pytest.mark.parametrize("mode", MODES)
def test_accepts_verls_counts(mode: LossAggMode) -> None:
    batch = make_batch(2)
    counts = {"dp_size": 2, "batch_num_tokens": 40, "global_batch_size": 12}
    # The other half is on another rank, and gradients are averaged over both ranks.
    norm = Normalizers(num_tokens=20, num_sequences=6, horizon=HORIZON)
    expected = run("vanilla", batch, mode, replace(CONFIG, normalizers=norm))
    given: Any = as_verl(CONFIG, counts)
    assert run("vanilla", batch, mode, given)[0] == expected[0]
    given = as_verl(replace(CONFIG, loss_scale_factor=None), counts)
    wide = replace(CONFIG, normalizers=replace(norm, horizon=batch.mask.shape[1]))
    assert run("vanilla", batch, mode, given)[0] == run("vanilla", batch, mode, wide)[0]


def test_rejects_impossible_settings_in_verls_form() -> None:
    with pytest.raises(ValueError, match="clip_ratio must be >= 0, got -1"):
        run("vanilla", make_batch(1), config={"clip_ratio": -1})  # type: ignore[arg-type]


def test_losses_get_zeros_at_masked_positions() -> None:
    batch = make_batch(6)
    terms = token_terms(
        batch.old, batch.new, batch.advantages, batch.mask, CONFIG, batch.weights.requires_grad_()
    )
    assert terms.weights is not None
    assert not terms.weights.requires_grad
    for column in (terms.old_log_prob, terms.log_prob, terms.advantages, terms.weights):
        assert bool((column[batch.mask == 0] == 0).all())
        assert bool((column[batch.mask != 0] != 0).all())
