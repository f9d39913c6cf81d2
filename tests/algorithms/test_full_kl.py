"""Exact KL in both directions, and sums of squared probabilities, against loops and autograd."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.algorithms import chunked_full_kl, chunked_sum_pi_squared
from slipstream.algorithms.full_kl import KLDirection

DIRECTIONS: tuple[KLDirection, ...] = ("reverse", "forward")


def inputs(
    n: int = 7, dtype: torch.dtype = torch.float64, *, d: int = 6, ref_d: int = 4
) -> tuple[Tensor, ...]:
    """Hidden states and heads of a policy and of a reference with a smaller width."""
    generator = torch.Generator().manual_seed(n)
    shapes = ((n, d), (11, d), (n, ref_d), (11, ref_d))
    hidden, weight, ref_hidden, ref_weight = (
        torch.randn(*shape, generator=generator).to(dtype) for shape in shapes
    )
    return hidden, weight, ref_hidden, ref_weight


def test_values_of_a_tiny_head() -> None:
    """With hidden width 1 and hidden state 1, the logits are the head's weights."""
    one = torch.ones(1, 1)
    policy = torch.tensor([[0.75], [0.25]]).log()
    ref = torch.tensor([[0.5], [0.5]]).log()
    reverse = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    forward = 0.5 * math.log(2 / 3) + 0.5 * math.log(2)
    assert float(chunked_full_kl(one, policy, one, ref)) == pytest.approx(reverse)
    both = chunked_full_kl(one, policy, one, ref, direction="forward")
    assert float(both) == pytest.approx(forward)
    assert float(chunked_full_kl(one, policy, one, policy)) == 0.0
    assert float(chunked_sum_pi_squared(one, policy)) == pytest.approx(0.625)
    # At temperature 0.5 odds are squared: 0.9 and 0.1.
    assert float(chunked_sum_pi_squared(one, policy, 0.5)) == pytest.approx(0.82)


def softmax(logits: list[float], temperature: float) -> list[float]:
    e = [math.exp(z / temperature) for z in logits]
    return [x / sum(e) for x in e]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("chunk_size", [1, 3, 100])
def test_values_equal_loops(direction: KLDirection, chunk_size: int) -> None:
    hidden, weight, ref_hidden, ref_weight = inputs()
    actual = chunked_full_kl(
        hidden, weight, ref_hidden, ref_weight, 0.7, chunk_size=chunk_size, direction=direction
    )
    squares = chunked_sum_pi_squared(hidden, weight, 0.7, chunk_size=chunk_size)
    for n in range(len(hidden)):
        p = softmax(F.linear(hidden[n], weight).tolist(), 0.7)
        q = softmax(F.linear(ref_hidden[n], ref_weight).tolist(), 0.7)
        assert float(squares[n]) == pytest.approx(sum(x * x for x in p), rel=1e-12)
        if direction == "forward":
            p, q = q, p
        expected = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        assert float(actual[n]) == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("chunk_size", [1, 3, 100])
def test_gradients_equal_autograd_through_all_logits(
    direction: KLDirection, chunk_size: int
) -> None:
    hidden, weight, ref_hidden, ref_weight = inputs()
    upstream = torch.linspace(-1, 2, 7, dtype=torch.float64)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    log_p = torch.log_softmax(F.linear(*leaves) / 0.7, -1)
    log_q = torch.log_softmax(F.linear(ref_hidden, ref_weight) / 0.7, -1)
    if direction == "reverse":
        plain = (log_p.exp() * (log_p - log_q)).sum(-1)
    else:
        plain = (log_q.exp() * (log_q - log_p)).sum(-1)
    expected = torch.autograd.grad((upstream * plain).sum(), leaves)
    kl = chunked_full_kl(
        hidden,
        weight,
        ref_hidden.requires_grad_(),
        ref_weight.requires_grad_(),
        0.7,
        chunk_size=chunk_size,
        direction=direction,
    )
    torch.autograd.backward((upstream * kl).sum())
    for leaf, wanted in zip(leaves, expected, strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, wanted, rtol=1e-11, atol=1e-12)
    assert ref_hidden.grad is None
    assert ref_weight.grad is None


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_gradcheck(direction: KLDirection) -> None:
    hidden, weight, ref_hidden, ref_weight = inputs(4)

    def kl(hidden: Tensor, weight: Tensor) -> Tensor:
        return chunked_full_kl(
            hidden, weight, ref_hidden, ref_weight, chunk_size=3, direction=direction
        )

    assert torch.autograd.gradcheck(kl, (hidden.requires_grad_(), weight.requires_grad_()))


def test_rows_are_bitwise_independent_of_chunks() -> None:
    # A width as in models. With a width of 6, results depend on the rows' alignment in memory.
    hidden, weight, ref_hidden, ref_weight = inputs(24, torch.float32, d=16, ref_d=8)
    whole = chunked_full_kl(hidden, weight, ref_hidden, ref_weight)
    squares = chunked_sum_pi_squared(hidden, weight)
    for chunk_size in (1, 5, 16):
        part = chunked_full_kl(
            hidden[:13], weight, ref_hidden[:13], ref_weight, chunk_size=chunk_size
        )
        assert torch.equal(part, whole[:13])
        part = chunked_sum_pi_squared(hidden[:13], weight, chunk_size=chunk_size)
        assert torch.equal(part, squares[:13])


def test_frozen_and_low_precision_inputs_and_no_rows() -> None:
    hidden, weight, ref_hidden, ref_weight = inputs(dtype=torch.bfloat16)
    kl = chunked_full_kl(hidden.requires_grad_(), weight, ref_hidden, ref_weight)
    assert kl.dtype == torch.float32
    torch.autograd.backward(kl.sum())
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.bfloat16
    assert weight.grad is None
    empty = chunked_full_kl(hidden[:0], weight, ref_hidden[:0], ref_weight)
    assert empty.shape == chunked_sum_pi_squared(hidden[:0], weight).shape == (0,)


def test_at_most_one_chunk_of_each_policys_logits_is_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows: list[int] = []
    linear = F.linear

    def spy(hidden: Tensor, weight: Tensor) -> Tensor:
        rows.append(len(hidden))
        return linear(hidden, weight)

    monkeypatch.setattr(F, "linear", spy)
    hidden, weight, ref_hidden, ref_weight = inputs(50, torch.float32)
    kl = chunked_full_kl(hidden.requires_grad_(), weight, ref_hidden, ref_weight, chunk_size=16)
    torch.autograd.backward(kl.sum())
    assert rows == [16, 16, 16, 16, 16, 16, 12, 12] * 2


def test_rejects_invalid_input() -> None:
    hidden, weight, ref_hidden, ref_weight = inputs()
    with pytest.raises(ValueError, match="got 7 and 6 rows, 11 and 11 tokens"):
        chunked_full_kl(hidden, weight, ref_hidden[:6], ref_weight)
    with pytest.raises(ValueError, match="got 7 and 7 rows, 11 and 9 tokens"):
        chunked_full_kl(hidden, weight, ref_hidden, ref_weight[:9])
    with pytest.raises(ValueError, match=r"hidden \(N, D\) and weight \(V, D\), got \(7, 4\)"):
        chunked_full_kl(hidden, weight, ref_hidden, weight)
    with pytest.raises(ValueError, match="unknown KL direction 'backward'; known: reverse"):
        chunked_full_kl(hidden, weight, ref_hidden, ref_weight, direction="backward")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="temperature > 0, got 0"):
        chunked_full_kl(hidden, weight, ref_hidden, ref_weight, 0.0)
    with pytest.raises(ValueError, match="chunk_size must be >= 1, got 0"):
        chunked_sum_pi_squared(hidden, weight, chunk_size=0)
