"""SAPO against values computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from slipstream.algorithms import PolicyLossConfig, sapo


def test_sapo_values() -> None:
    config = PolicyLossConfig(tau_pos=1.0, tau_neg=2.0)
    log_prob = torch.tensor([[2.0, 0.5]], dtype=torch.float64).log().requires_grad_()
    advantages = torch.tensor([[3.0, -1.0]], dtype=torch.float64)
    loss, metrics = sapo(
        torch.zeros(1, 2, dtype=torch.float64),
        log_prob,
        advantages,
        torch.ones(1, 2),
        config=config,
    )
    (grad,) = torch.autograd.grad(loss, log_prob)
    up, down = 1 / (1 + math.exp(-1.0)), 1 / (1 + math.exp(1.0))
    assert loss.item() == pytest.approx((-3 * 4 * up + 2 * down) / 2)
    # d gate / d log r = 4 g (1 - g) r.
    expected = [-3 * 4 * up * (1 - up) * 2 / 2, 4 * down * (1 - down) * 0.5 / 2]
    assert grad[0].tolist() == pytest.approx(expected)
    assert metrics["actor/pg_clipfrac"] == metrics["actor/pg_clipfrac_lower"] == 0.0


def test_advantage_of_zero_has_zero_loss() -> None:
    one = torch.ones(1, 1)
    assert sapo(0 * one, one, 0 * one, one)[0].item() == 0.0


def test_rows_have_equal_weight_for_any_length() -> None:
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    zeros = torch.zeros(2, 3)
    advantages = torch.tensor([[1.0] * 3, [3.0] * 3])
    # At ratio 1 the gate is 2 / tau = 2.
    assert sapo(zeros, zeros, advantages, mask, "token-mean")[0].item() == pytest.approx(-4.0)
