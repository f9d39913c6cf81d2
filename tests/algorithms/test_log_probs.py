"""Log-probs: closed forms, and chunked computation bitwise equal to plain computation."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.algorithms import chunked_token_log_probs, token_log_probs
from slipstream.algorithms import log_probs as log_probs_module


def inputs(
    n: int, *, d: int = 16, v: int = 37, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    hidden = torch.randn(n, d, generator=generator).to(dtype)
    weight = torch.randn(v, d, generator=generator).to(dtype)
    return hidden, weight, torch.randint(v, (n,), generator=generator)


def entropy(logits: Tensor) -> Tensor:
    log_p = torch.log_softmax(logits, -1)
    return -(log_p.exp() * log_p).sum(-1)


def test_token_log_probs_match_closed_forms() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)], [math.log(9.0), 0.0]])
    labels = torch.tensor([1, 0])
    assert token_log_probs(logits, labels).tolist() == pytest.approx(
        [math.log(0.75), math.log(0.9)]
    )
    # At temperature 2 odds become their square root: 3 / (3 + 1) for the second row.
    assert float(token_log_probs(logits, labels, 2.0)[1]) == pytest.approx(math.log(0.75))


def test_token_log_probs_accept_any_leading_shape_and_low_precision() -> None:
    out = token_log_probs(torch.zeros(2, 3, 4, dtype=torch.bfloat16), torch.zeros(2, 3).long())
    assert out.dtype == torch.float32
    assert out.shape == (2, 3)
    assert float(out[1, 2]) == pytest.approx(-math.log(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_size", [1, 5, 12, 16, 1000])
def test_chunked_forward_is_bitwise_equal_to_plain(
    dtype: torch.dtype, temperature: float, chunk_size: int
) -> None:
    hidden, weight, labels = inputs(24, d=64, v=301, dtype=dtype)
    expected = token_log_probs(F.linear(hidden, weight), labels, temperature)
    for n in (24, 23, 13, 12, 3, 1):
        actual, _ = chunked_token_log_probs(
            hidden[:n], weight, labels[:n], temperature, chunk_size=chunk_size
        )
        assert torch.equal(actual, expected[:n])


def test_scalar_temperature_equals_per_row_temperatures() -> None:
    logits = torch.randn(64, 301, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(64)
    per_row = torch.full((64, 1), 0.7)
    expected = torch.log_softmax(logits / per_row, dim=-1)[torch.arange(64), labels]
    assert torch.equal(token_log_probs(logits, labels, 0.7), expected)


def test_single_row_differs_without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason for `_pad_rows`. If this fails, the kernels no longer depend on the number of
    rows."""
    hidden, weight, labels = inputs(24, d=64, v=301)
    expected = token_log_probs(F.linear(hidden, weight), labels)
    monkeypatch.setattr(log_probs_module, "_pad_rows", lambda hidden: hidden)
    actual, _ = chunked_token_log_probs(hidden, weight, labels, chunk_size=1)
    if torch.equal(actual, expected):
        pytest.skip("this machine's matrix product does not depend on the number of rows")
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("chunk_size", [1, 4, 7, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("uses", ["log_probs", "entropies", "both"])
def test_chunked_gradients_equal_plain(chunk_size: int, temperature: float, uses: str) -> None:
    hidden, weight, labels = inputs(10, dtype=torch.float64)
    upstream = torch.randn(2, 10, generator=torch.Generator().manual_seed(5), dtype=torch.float64)

    def grads(log_probs: Tensor, entropies: Tensor, leaves: tuple[Tensor, Tensor]) -> list[Tensor]:
        terms = {"log_probs": upstream[0] * log_probs, "entropies": upstream[1] * entropies}
        chosen = list(terms.values()) if uses == "both" else [terms[uses]]
        return list(torch.autograd.grad(torch.stack(chosen).sum(), leaves))

    plain = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logits = F.linear(*plain)
    expected_outputs = (
        token_log_probs(logits, labels, temperature),
        entropy(logits / temperature),
    )
    chunked = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    outputs = chunked_token_log_probs(*chunked, labels, temperature, chunk_size=chunk_size)
    torch.testing.assert_close(outputs, expected_outputs, rtol=1e-12, atol=1e-12)
    for actual, expected in zip(
        grads(*outputs, chunked), grads(*expected_outputs, plain), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)


def test_gradcheck() -> None:
    hidden, weight, labels = inputs(5, d=3, v=4, dtype=torch.float64)

    def both(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return chunked_token_log_probs(hidden, weight, labels, 0.8, chunk_size=2)

    assert torch.autograd.gradcheck(both, (hidden.requires_grad_(), weight.requires_grad_()))


def test_low_precision_gradients_keep_dtype_and_sum_in_float32() -> None:
    hidden, weight, labels = inputs(64, d=32, v=50, dtype=torch.bfloat16)
    low = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    torch.autograd.backward(chunked_token_log_probs(*low, labels, chunk_size=4)[0].sum())
    high = hidden.float().requires_grad_(), weight.float().requires_grad_()
    torch.autograd.backward(token_log_probs(F.linear(*high), labels).sum())
    for a, b in zip(low, high, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert a.grad.dtype == torch.bfloat16
        error = (a.grad.float() - b.grad).norm() / b.grad.norm()
        assert float(error) < 0.01


def test_frozen_inputs_get_no_gradient() -> None:
    hidden, weight, labels = inputs(6)
    hidden.requires_grad_()
    log_probs, entropies = chunked_token_log_probs(hidden, weight, labels, chunk_size=4)
    torch.autograd.backward(log_probs.sum() + entropies.sum())
    assert hidden.grad is not None
    assert weight.grad is None


def test_empty_input() -> None:
    hidden, weight, labels = inputs(0)
    log_probs, entropies = chunked_token_log_probs(
        hidden.requires_grad_(), weight.requires_grad_(), labels
    )
    assert log_probs.shape == entropies.shape == (0,)
    torch.autograd.backward(log_probs.sum())
    assert weight.grad is not None
    assert float(weight.grad.abs().sum()) == 0.0


def test_at_most_one_chunk_of_logits_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    linear = F.linear

    def spy(hidden: Tensor, weight: Tensor) -> Tensor:
        rows.append(len(hidden))
        return linear(hidden, weight)

    monkeypatch.setattr(F, "linear", spy)
    hidden, weight, labels = inputs(50)
    log_probs, _ = chunked_token_log_probs(
        hidden.requires_grad_(), weight.requires_grad_(), labels, chunk_size=16
    )
    torch.autograd.backward(log_probs.sum())
    assert rows == [16, 16, 16, 12] * 2


def test_rejects_invalid_input() -> None:
    hidden, weight, labels = inputs(6)
    with pytest.raises(ValueError, match="temperature > 0, got 0"):
        chunked_token_log_probs(hidden, weight, labels, 0.0)
    with pytest.raises(ValueError, match="temperature > 0, got 0"):
        token_log_probs(hidden, labels, 0.0)
    with pytest.raises(ValueError, match="chunk_size must be >= 1, got 0"):
        chunked_token_log_probs(hidden, weight, labels, chunk_size=0)
    with pytest.raises(ValueError, match=r"labels \(N,\) for hidden \(N, D\), got \(5,\)"):
        chunked_token_log_probs(hidden, weight, labels[:5])
