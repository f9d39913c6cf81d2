"""The entropy bonus."""

from __future__ import annotations

import pytest
import torch

from slipstream.algorithms import Normalizers, entropy_loss


def test_entropy_bonus_lowers_the_loss() -> None:
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    norm = Normalizers.from_mask(mask)
    entropy = torch.tensor([[1.0, 2.0], [3.0, 9.0]])
    assert float(entropy_loss(entropy, mask, "token-mean", norm, coeff=0.1)) == pytest.approx(-0.2)
    logits = torch.tensor([[[2.0, 0.0], [2.0, 0.0]], [[2.0, 0.0], [2.0, 0.0]]], requires_grad=True)
    log_p = torch.log_softmax(logits, -1)
    bonus = entropy_loss(-(log_p.exp() * log_p).sum(-1), mask, "token-mean", norm, coeff=0.1)
    torch.autograd.backward(bonus)
    assert logits.grad is not None
    # Gradient descent lowers the probability of the likelier token.
    assert float(logits.grad[0, 0, 0]) > 0
    assert float(logits.grad[1, 1, 0]) == 0
