"""Variance and whitening against values computed by hand."""

from __future__ import annotations

import pytest
import torch

from slipstream.algorithms import masked_whiten

NAN = float("nan")
VALUES = torch.tensor([[1.0, NAN, 2.0], [6.0, NAN, NAN]])
MASK = torch.tensor([[1, 0, 1], [1, 0, 0]])


def test_masked_whiten() -> None:
    # Mean 3, squared deviations 4 + 1 + 9, variance 7 with n - 1.
    scale = (7 + 1e-8) ** 0.5
    out = masked_whiten(VALUES, MASK)
    expected = torch.tensor([[-2 / scale, 0.0, -1 / scale], [3 / scale, 0.0, 0.0]])
    torch.testing.assert_close(out, expected)
    kept = masked_whiten(VALUES, MASK, shift_mean=False)
    torch.testing.assert_close(kept, torch.where(MASK != 0, expected + 3, 0.0))
    assert out.dtype == torch.float32


def test_equal_values_whiten_to_zero() -> None:
    assert not masked_whiten(torch.full((3, 7), 0.1), torch.ones(3, 7)).any()


def test_rejects_too_few_tokens_and_suggests_an_estimator() -> None:
    with pytest.raises(ValueError, match=r"at least 2 target tokens, got 1; .*such as grpo"):
        masked_whiten(torch.ones(1, 2), torch.tensor([[1, 0]]))
    with pytest.raises(ValueError, match=r"one shape, got \(1, 2\) and \(2, 1\)"):
        masked_whiten(torch.ones(1, 2), torch.ones(2, 1))
