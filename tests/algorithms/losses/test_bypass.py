"""Bypass mode: both objectives, and rejected input."""

from __future__ import annotations

import math

import pytest
import torch

from slipstream.algorithms import (
    PolicyLossConfig,
    PolicyLossModeConfig,
    bypass_mode,
    get_policy_loss_fn,
)

REINFORCE = PolicyLossConfig(policy_loss=PolicyLossModeConfig(loss_type="reinforce"))
ROLLOUT = torch.tensor([[-1.0, -2.0]], dtype=torch.float64)
LOG_PROB = torch.tensor([[-1.5, -1.0]], dtype=torch.float64)
ADVANTAGES = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
MASK = torch.ones(1, 2)


def test_ppo_clip_equals_vanilla() -> None:
    loss, metrics = bypass_mode(ROLLOUT, LOG_PROB, ADVANTAGES, MASK)
    assert loss.item() == pytest.approx((-math.exp(-0.5) - 2 * 1.2) / 2)
    assert float(metrics["actor/pg_clipfrac"]) == 0.5


def test_reinforce_values() -> None:
    log_prob = LOG_PROB.clone().requires_grad_()
    weights = torch.tensor([[0.5, 2.0]], dtype=torch.float64, requires_grad=True)
    loss, metrics = bypass_mode(
        ROLLOUT, log_prob, ADVANTAGES, MASK, config=REINFORCE, rollout_is_weights=weights
    )
    torch.autograd.backward(loss)
    assert loss.item() == pytest.approx((0.5 * 1.5 + 2 * 2 * 1.0) / 2)
    assert log_prob.grad is not None
    assert log_prob.grad[0].tolist() == pytest.approx([-0.25, -2.0])
    assert weights.grad is None
    assert float(metrics["actor/ppo_kl"]) == pytest.approx((0.5 - 1.0) / 2)
    plain, _ = bypass_mode(ROLLOUT, LOG_PROB, ADVANTAGES, MASK, config=REINFORCE)
    assert plain.item() == pytest.approx((1.5 + 2.0) / 2)


def test_rejected_tokens_do_not_count() -> None:
    loss, _ = bypass_mode(
        ROLLOUT, LOG_PROB, ADVANTAGES, torch.tensor([[0.0, 1.0]]), config=REINFORCE
    )
    assert loss.item() == pytest.approx(2.0)


def test_rollout_correction_is_an_alias() -> None:
    assert get_policy_loss_fn("rollout_correction") is bypass_mode


def test_rejects_invalid_input() -> None:
    with pytest.raises(ValueError, match=r"rollout's log-probs .*use an engine that records"):
        bypass_mode(None, LOG_PROB, ADVANTAGES, MASK)
    with pytest.raises(ValueError, match=r"loss_type=ppo_clip takes no rollout_is_weights"):
        bypass_mode(ROLLOUT, LOG_PROB, ADVANTAGES, MASK, rollout_is_weights=MASK)
    with pytest.raises(ValueError, match=r"loss_type must be one of ppo_clip, reinforce, got 'pg'"):
        PolicyLossModeConfig(loss_type="pg")
