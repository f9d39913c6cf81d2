"""DRO against values computed by hand."""

from __future__ import annotations

import pytest
import torch

from slipstream.algorithms import PolicyLossConfig, PolicyLossModeConfig, dro


def test_dro_values() -> None:
    config = PolicyLossConfig(policy_loss=PolicyLossModeConfig(dro_beta=0.5))
    log_prob = torch.tensor([[-1.0, -50.0]], requires_grad=True)
    old = torch.tensor([[-3.0, -10.0]])
    loss, metrics = dro(old, log_prob, torch.tensor([[2.0, 0.0]]), torch.ones(1, 2), config=config)
    (grad,) = torch.autograd.grad(loss, log_prob)
    # 2 + 0.25 * 4, and 0.25 * 1600: the penalty is not clamped.
    assert loss.item() == pytest.approx((3.0 + 400.0) / 2)
    assert grad[0].tolist() == pytest.approx([(-2 + 0.5 * 2) / 2, 0.5 * -40 / 2])
    assert metrics["actor/pg_clipfrac"] == 0.0


def test_requires_dro_beta() -> None:
    one = torch.ones(1, 1)
    with pytest.raises(ValueError, match=r"loss_mode=dro needs policy_loss\.dro_beta > 0"):
        dro(one, one, one, one)
