"""CISPO against values computed by hand."""

from __future__ import annotations

import pytest
import torch

from slipstream.algorithms import PolicyLossConfig, cispo


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight", "clipped"),
    [(1.1, 2.0, 1.1, 0), (1.5, 2.0, 1.2, 1), (0.5, 2.0, 0.8, 1), (1.5, -2.0, 1.2, 1)],
)
def test_cispo_values(ratio: float, advantage: float, weight: float, clipped: int) -> None:
    log_prob = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    old = log_prob.detach() - torch.tensor([[ratio]], dtype=torch.float64).log()
    loss, metrics = cispo(
        old, log_prob, torch.full((1, 1), advantage, dtype=torch.float64), torch.ones(1, 1)
    )
    (grad,) = torch.autograd.grad(loss, log_prob)
    assert loss.item() == pytest.approx(weight * advantage)
    assert grad.item() == pytest.approx(-weight * advantage)  # clipped tokens learn too
    assert float(metrics["actor/pg_clipfrac"]) == clipped


def test_clip_ratio_low_of_one_or_more_removes_the_lower_bound() -> None:
    config = PolicyLossConfig(clip_ratio_low=10.0, clip_ratio_high=0.2)
    one = torch.ones(1, 1, dtype=torch.float64)
    loss, metrics = cispo(-1 * one, -6 * one, one, one, config=config)
    assert loss.item() == pytest.approx(6 * 2.718281828**-5)
    assert float(metrics["actor/pg_clipfrac"]) == 0.0
