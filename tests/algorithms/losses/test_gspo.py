"""GSPO against values computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from slipstream.algorithms import PolicyLossConfig, PolicyLossModeConfig, gspo


def test_gspo_values() -> None:
    # Row 0: mean k = (0.3 - 0.1) / 2 = 0.1, inside the clip. Row 1: k = 0.5, clipped at 1.2.
    old = torch.zeros(2, 2, dtype=torch.float64)
    log_prob = torch.tensor([[0.3, -0.1], [0.5, 9.0]], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([[2.0, 2.0], [1.0, 1.0]], dtype=torch.float64)
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    loss, metrics = gspo(old, log_prob, advantages, mask)
    (grad,) = torch.autograd.grad(loss, log_prob)
    ratio = math.exp(0.1)
    assert loss.item() == pytest.approx((-2 * ratio - 1.2) / 2)
    assert grad.tolist() == [pytest.approx([-ratio / 2, -ratio / 2]), [0.0, 0.0]]
    assert float(metrics["actor/pg_clipfrac"]) == pytest.approx(1 / 3)
    assert float(metrics["actor/ppo_kl"]) == pytest.approx(-(0.3 - 0.1 + 0.5) / 3)
    assert metrics["actor/pg_clipfrac_lower"] == 0.0


def test_sequence_ratio_stays_finite() -> None:
    log_prob = torch.zeros(1, 1, requires_grad=True)
    loss, _ = gspo(torch.full((1, 1), -500.0), log_prob, -torch.ones(1, 1), torch.ones(1, 1))
    assert loss.item() == pytest.approx(math.exp(10.0))


def test_clip_range_of_the_paper_has_an_effect() -> None:
    config = PolicyLossConfig(clip_ratio_low=3e-4, clip_ratio_high=4e-4)
    one = torch.ones(1, 1, dtype=torch.float64)
    assert gspo(0 * one, 0.01 * one, one, one, config=config)[0].item() == pytest.approx(-1.0004)
    assert gspo(0 * one, -0.01 * one, -one, one, config=config)[0].item() == pytest.approx(0.9997)


def test_with_the_setting_gspo_aggregates_like_other_losses() -> None:
    # One token of row 0 has the ratio exp(0.3), both of row 1 exp(0.1), and nothing is clipped.
    config = PolicyLossConfig(
        clip_ratio=0.5, policy_loss=PolicyLossModeConfig(gspo_uses_loss_agg_mode=True)
    )
    log_prob = torch.tensor([[0.3, 9.0], [0.2, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    first, second = math.exp(0.3), math.exp(0.1)
    losses = {
        mode: gspo(0 * log_prob, log_prob, mask.double(), mask, mode, config)[0].item()
        for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")
    }
    assert losses == {
        "token-mean": pytest.approx(-(first + 2 * second) / 3),
        "seq-mean-token-mean": pytest.approx(-(first + second) / 2),
        "seq-mean-token-sum": pytest.approx(-(first + 2 * second) / 2),
    }
