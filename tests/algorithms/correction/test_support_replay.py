"""Support replay: log masses against loops, gradients, and unbiased ratios."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.algorithms.correction import (
    KeptIds,
    log_probs_on_support,
    support_log_mass,
)

KEPT = [[0, 3], [], [4], [1, 2, 0, 6], [5, 6, 0, 1, 2, 3, 4], [2, 5], [1]]


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(7, 5, generator=generator).to(dtype)
    return hidden, torch.randn(7, 5, generator=generator).to(dtype)


def plain_mass(logits: Tensor, kept: list[list[int]], temperature: float = 1.0) -> Tensor:
    """Log of the mass of the kept ids, row by row from all logits; 0 if nothing is cut."""
    rows = [
        (torch.logsumexp(z[ids], 0) - torch.logsumexp(z, 0)) if ids else z.sum() * 0
        for z, ids in zip(logits / temperature, kept, strict=True)
    ]
    return torch.stack(rows)


def test_log_probs_and_mass_values() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    mass = support_log_mass(logits, None, KeptIds.of([[0, 1]]))
    assert mass.exp().tolist() == pytest.approx([0.75])
    # The truncated distribution has 2/3 and 1/3.
    law = log_probs_on_support(torch.tensor([0.5, 0.25]).log(), mass)
    assert law.exp().tolist() == pytest.approx([2 / 3, 1 / 3])
    # At temperature 0.5 odds are squared: 1/4, 1/16, 1/64, 1/64.
    cold = support_log_mass(logits, None, KeptIds.of([[0, 1]]), 0.5)
    assert float(cold.exp()) == pytest.approx(20 / 22)


def loop_mass(logits: list[float], kept: list[int], temperature: float) -> float:
    if not kept:
        return 0.0
    e = [math.exp(z / temperature) for z in logits]
    return math.log(sum(e[k] for k in kept) / sum(e))


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_both_forms_equal_loops(chunk_size: int, temperature: float) -> None:
    hidden, weight = inputs()
    logits = F.linear(hidden, weight)
    expected = [
        loop_mass(row, kept, temperature) for row, kept in zip(logits.tolist(), KEPT, strict=True)
    ]
    kept = KeptIds.of(KEPT)
    whole = plain_mass(logits, KEPT, temperature)
    assert whole.tolist() == pytest.approx(expected, abs=1e-12)
    chunked = support_log_mass(hidden, weight, kept, temperature, chunk_size=chunk_size)
    assert chunked.tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("chunk_size", [2, 3, 100])
def test_gradients_equal_those_through_all_logits(chunk_size: int) -> None:
    kept, upstream = KeptIds.of(KEPT), torch.linspace(-1, 2, 7, dtype=torch.float64)
    plain = [x.requires_grad_() for x in inputs()]
    mass = plain_mass(F.linear(*plain), KEPT, 0.7)
    expected = torch.autograd.grad((upstream * mass).sum(), plain)
    hidden, weight = (x.requires_grad_() for x in inputs())
    chunked = support_log_mass(hidden, weight, kept, 0.7, chunk_size=chunk_size)
    actual = torch.autograd.grad((upstream * chunked).sum(), (hidden, weight))
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
    # If all ids are kept, by an empty or a full list, the mass is 1 for any weights.
    assert float(actual[0][[1, 4]].abs().max()) < 1e-12


def test_gradcheck() -> None:
    hidden, weight = inputs()
    kept = KeptIds.of(KEPT)
    both = (hidden.requires_grad_(), weight.requires_grad_())
    assert torch.autograd.gradcheck(
        lambda h, w: support_log_mass(h, w, kept, 0.8, chunk_size=2), both
    )


def test_frozen_inputs_and_no_rows() -> None:
    hidden, weight = inputs(torch.float32)
    mass = support_log_mass(hidden.requires_grad_(), weight, KeptIds.of(KEPT))
    torch.autograd.backward(mass.sum())
    assert hidden.grad is not None
    assert weight.grad is None
    assert mass.dtype == torch.float32
    assert support_log_mass(hidden[:0], weight, KeptIds.of([])).shape == (0,)


def test_ratio_of_truncated_distributions_has_mean_1() -> None:
    """The exact expectation under the rollout's distribution; the ratio of full distributions has
    another mean."""
    generator = torch.Generator().manual_seed(2)
    rollout = torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(0)
    trained = torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(0)
    kept = KeptIds.of([[0, 2, 5]])
    ids = kept.ids
    law = log_probs_on_support(rollout[ids], support_log_mass(rollout[None], None, kept))
    new = log_probs_on_support(trained[ids], support_log_mass(trained[None], None, kept))
    assert float(law.exp().sum()) == pytest.approx(1.0)
    assert float((law.exp() * (new - law).exp()).sum()) == pytest.approx(1.0)
    biased = float((law.exp() * (trained[ids] - rollout[ids]).exp()).sum())
    assert abs(biased - 1) > 0.05


def test_rejects_invalid_input() -> None:
    hidden, weight = inputs()
    with pytest.raises(ValueError, match="kept ids of 1 positions do not fit 7 rows"):
        support_log_mass(hidden, weight, KeptIds.of([[1]]))
    with pytest.raises(ValueError, match="temperature > 0"):
        support_log_mass(hidden, weight, KeptIds.of(KEPT), 0.0)
    with pytest.raises(ValueError, match="chunk_size must be >= 1, got 0"):
        support_log_mass(hidden, weight, KeptIds.of(KEPT), chunk_size=0)
    with pytest.raises(ValueError, match=r"must rise from 0 to 2, got \[0, 1\]"):
        KeptIds(torch.tensor([1, 2]), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"must be int64, got torch\.int32"):
        KeptIds(torch.tensor([1], dtype=torch.int32), torch.tensor([0, 1]))
