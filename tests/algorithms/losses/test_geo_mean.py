"""GMPO against values computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from slipstream.algorithms import PolicyLossConfig, geo_mean

CONFIG = PolicyLossConfig(clip_ratio_low=0.4, clip_ratio_high=0.2)
K = torch.tensor([[0.5, -0.5], [-0.6, 7.0], [7.0, 7.0]], dtype=torch.float64)
ADVANTAGES = torch.tensor([[1.0, 1.0], [-2.0, 7.0], [7.0, 7.0]], dtype=torch.float64)
MASK = torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]])


def test_geo_mean_values() -> None:
    log_prob = K.clone().requires_grad_()
    loss, metrics = geo_mean(torch.zeros_like(K), log_prob, ADVANTAGES, MASK, config=CONFIG)
    (grad,) = torch.autograd.grad(loss, log_prob)
    # Row 0, A > 0: 0.5 is clipped to 0.2, -0.5 is not. Row 1, A < 0: -0.6 is clipped to -0.4.
    first, second = -math.exp((0.2 - 0.5) / 2), 2 * math.exp(-0.4)
    assert loss.item() == pytest.approx((first + second) / 2)
    assert grad.tolist() == [[0.0, pytest.approx(first / 2 / 2)], [0.0, 0.0], [0.0, 0.0]]
    assert float(metrics["actor/pg_clipfrac"]) == pytest.approx(2 / 3)
    assert float(metrics["actor/pg_clipfrac_lower"]) == pytest.approx(1 / 3)
    assert float(metrics["actor/ppo_kl"]) == pytest.approx(0.6 / 3)


def test_geo_mean_ignores_the_aggregation_mode() -> None:
    losses = [
        geo_mean(torch.zeros_like(K), K, ADVANTAGES, MASK, mode, CONFIG)[0].item()
        for mode in ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm")
    ]
    assert len(set(losses)) == 1


def test_loss_is_scaled_by_the_geometric_mean_of_importance_weights() -> None:
    args = (torch.zeros_like(K), K, ADVANTAGES, MASK)
    weights = torch.tensor([[4.0, 1.0], [0.5, torch.nan], [9.0, 9.0]], dtype=torch.float64)
    loss = geo_mean(*args, config=CONFIG, rollout_is_weights=weights)[0].item()
    first, second = -math.exp((0.2 - 0.5) / 2), 2 * math.exp(-0.4)
    assert loss == pytest.approx((2.0 * first + 0.5 * second) / 2)
    weights[1, 0] = 0.0
    loss = geo_mean(*args, config=CONFIG, rollout_is_weights=weights)[0].item()
    assert loss == pytest.approx((2.0 * first + 1e-10 * second) / 2)
