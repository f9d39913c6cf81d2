"""DPPO with total variation and with KL, against values computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from slipstream.algorithms import PolicyLossConfig, get_policy_loss_fn


def one_token(
    name: str, q: float, p: float, advantage: float, config: PolicyLossConfig
) -> tuple[float, float, float, float]:
    """(loss, d loss / d log_prob, outside, truncated) of a token with old probability q and new
    probability p."""
    log_prob = torch.tensor([[p]], dtype=torch.float64).log().requires_grad_()
    loss, metrics = get_policy_loss_fn(name)(
        torch.tensor([[q]], dtype=torch.float64).log(),
        log_prob,
        torch.tensor([[advantage]], dtype=torch.float64),
        torch.ones(1, 1),
        "token-mean",
        config,
    )
    (grad,) = torch.autograd.grad(loss, log_prob)
    return (
        loss.item(),
        grad.item(),
        float(metrics["actor/pg_clipfrac"]),
        float(metrics["actor/pg_clipfrac_lower"]),
    )


@pytest.mark.parametrize(
    ("q", "p", "advantage", "inside", "truncated"),
    [
        (0.5, 0.6, 1.0, True, False),
        (0.5, 0.8, 1.0, False, False),  # rose by more than 0.2 and A > 0
        (0.5, 0.8, -1.0, True, False),  # rose, but A < 0 pulls it back
        (0.5, 0.3, -1.0, False, False),  # fell by more than 0.1 and A < 0
        (0.5, 0.3, 1.0, True, False),
        (0.01, 0.1, 1.0, True, True),  # ratio 10, far outside PPO's clip, yet p - q is small
        (0.5, 0.3, 0.0, False, False),
    ],
)
def test_tv_values(q: float, p: float, advantage: float, inside: bool, truncated: bool) -> None:
    config = PolicyLossConfig(clip_ratio_low=0.1, clip_ratio_high=0.2)
    loss, grad, outside, cut = one_token("dppo_tv", q, p, advantage, config)
    weight = min(p / q, 3.0) if inside else 0.0
    assert loss == pytest.approx(-weight * advantage * math.log(p))
    assert grad == pytest.approx(-weight * advantage)
    assert (outside, cut) == (not inside, truncated)


@pytest.mark.parametrize(
    ("q", "p", "advantage", "inside"),
    [
        (0.5, 0.6, 1.0, True),  # KL 0.0204
        (0.5, 0.8, 1.0, False),  # KL 0.2231
        (0.5, 0.8, -1.0, True),  # moves back
        (0.5, 0.2, -1.0, False),
        (0.5, 0.2, 1.0, True),
        (0.5, 0.75, 1.0, True),  # KL 0.1438, below high
        (0.5, 0.25, -1.0, False),  # the same, above low
    ],
)
def test_kl_values(q: float, p: float, advantage: float, inside: bool) -> None:
    config = PolicyLossConfig(clip_ratio_low=0.1, clip_ratio_high=0.2)
    loss, grad, outside, _ = one_token("dppo_kl", q, p, advantage, config)
    weight = p / q if inside else 0.0
    assert loss == pytest.approx(-weight * advantage * math.log(p))
    assert grad == pytest.approx(-weight * advantage)
    assert outside == (not inside)


def test_certain_tokens_stay_finite() -> None:
    for name in ("dppo_tv", "dppo_kl"):
        for q, p in ((1.0, 1.0), (0.5, 1.0), (1.0, 0.5)):
            loss, grad, _, _ = one_token(name, q, p, -1.0, PolicyLossConfig())
            assert math.isfinite(loss)
            assert math.isfinite(grad)
