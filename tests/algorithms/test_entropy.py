"""Entropy from logits: closed forms, chunks, gradients, and logits of -inf."""

from __future__ import annotations

import math

import pytest
import torch

from slipstream.algorithms import Normalizers, entropy_from_logits, entropy_loss


def test_closed_forms() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, -torch.inf, -torch.inf], [99, 0, 0, 0]])
    assert entropy_from_logits(logits).tolist() == pytest.approx(
        [math.log(4), math.log(2), 0.0], abs=1e-6
    )
    p = torch.tensor([0.5, 0.25, 0.25])
    assert float(entropy_from_logits(p.log())) == pytest.approx(1.5 * math.log(2))


@pytest.mark.parametrize("chunk_size", [1, 3, 100])
def test_chunks_change_nothing(chunk_size: int) -> None:
    logits = torch.randn(2, 5, 11, generator=torch.Generator().manual_seed(0))
    whole, parts = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    expected = entropy_from_logits(whole)
    actual = entropy_from_logits(parts, chunk_size=chunk_size)
    assert actual.shape == (2, 5)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    torch.autograd.backward(expected.square().sum())
    torch.autograd.backward(actual.square().sum())
    torch.testing.assert_close(parts.grad, whole.grad, rtol=0, atol=1e-6)


def test_gradient_is_exact() -> None:
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert torch.autograd.gradcheck(entropy_from_logits, (logits.requires_grad_(),))


def test_tokens_with_logits_of_minus_infinity_have_no_gradient() -> None:
    logits = torch.tensor([[0.0, 1.0, -torch.inf]], requires_grad=True)
    torch.autograd.backward(entropy_from_logits(logits).sum())
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())
    assert float(logits.grad[0, 2]) == 0.0


def test_low_precision_logits_are_computed_in_float32() -> None:
    assert entropy_from_logits(torch.zeros(2, 4, dtype=torch.bfloat16)).dtype == torch.float32


def test_chunk_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="chunk_size must be >= 1, got 0"):
        entropy_from_logits(torch.zeros(2, 4), chunk_size=0)


def test_entropy_bonus_lowers_the_loss() -> None:
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    norm = Normalizers.from_mask(mask)
    entropy = torch.tensor([[1.0, 2.0], [3.0, 9.0]])
    assert float(entropy_loss(entropy, mask, "token-mean", norm, coeff=0.1)) == pytest.approx(-0.2)
    logits = torch.tensor([[[2.0, 0.0], [2.0, 0.0]], [[2.0, 0.0], [2.0, 0.0]]], requires_grad=True)
    bonus = entropy_loss(entropy_from_logits(logits), mask, "token-mean", norm, coeff=0.1)
    torch.autograd.backward(bonus)
    assert logits.grad is not None
    # Gradient descent lowers the probability of the likelier token.
    assert float(logits.grad[0, 0, 0]) > 0
    assert float(logits.grad[1, 1, 0]) == 0
