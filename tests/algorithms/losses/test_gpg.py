"""The plain policy gradient against values computed by hand."""

from __future__ import annotations

import pytest
import torch

from slipstream.algorithms import PolicyLossConfig, get_policy_loss_fn


@pytest.mark.parametrize("name", ["gpg", "reinforce", "policy_gradient"])
def test_policy_gradient_values(name: str) -> None:
    log_prob = torch.tensor([[-1.0, -2.0], [-3.0, float("nan")]], requires_grad=True)
    advantages = torch.tensor([[1.0, 1.0], [-2.0, -2.0]])
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    loss, metrics = get_policy_loss_fn(name)(
        None, log_prob, advantages, mask, "token-mean", PolicyLossConfig(), None
    )
    torch.autograd.backward(loss)
    assert loss.item() == pytest.approx((1.0 + 2.0 - 6.0) / 3)
    assert metrics == {}
    assert log_prob.grad is not None
    torch.testing.assert_close(log_prob.grad, torch.tensor([[-1.0, -1.0], [2.0, 0.0]]) / 3)
