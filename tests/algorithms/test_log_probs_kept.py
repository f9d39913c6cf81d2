"""Chunks of logits that are kept for the backward pass: equal results, fewer matrix products."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.algorithms import chunked_token_log_probs
from tests.algorithms.test_log_probs import inputs

CHUNK_BYTES = 16 * 37 * 4


def spied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    rows: list[int] = []
    linear = F.linear

    def spy(hidden: Tensor, weight: Tensor) -> Tensor:
        rows.append(len(hidden))
        return linear(hidden, weight)

    monkeypatch.setattr(F, "linear", spy)
    return rows


@pytest.mark.parametrize("uses", ["log_probs", "entropies", "both"])
@pytest.mark.parametrize("chunks_kept", [0, 2, 9])
def test_kept_chunks_are_not_recomputed(
    monkeypatch: pytest.MonkeyPatch, uses: str, chunks_kept: int
) -> None:
    hidden, weight, labels = inputs(50)
    upstream = torch.randn(2, 50, generator=torch.Generator().manual_seed(5))

    def both(keep_bytes: int) -> list[Tensor]:
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        results = chunked_token_log_probs(
            *leaves, labels, 0.7, chunk_size=16, keep_bytes=keep_bytes
        )
        terms = [g * x for g, x in zip(upstream, results, strict=True)]
        chosen = terms if uses == "both" else [terms[uses == "entropies"]]
        loss = torch.stack(chosen).sum()
        grads = torch.autograd.grad(loss, leaves, retain_graph=True)
        # Kept chunks are overwritten by the first backward pass; a second one must be correct.
        again = torch.autograd.grad(loss, leaves)
        for a, b in zip(grads, again, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        return [*results, *grads]

    plain = both(0)
    rows = spied(monkeypatch)
    kept = both(chunks_kept * CHUNK_BYTES)
    assert rows == [16, 16, 16, 12, *[16, 16, 16, 12][chunks_kept:], 16, 16, 16, 12]
    assert torch.equal(kept[0], plain[0])
    assert torch.equal(kept[1], plain[1])
    for a, b in zip(kept[2:], plain[2:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_entropies_are_bitwise_independent_of_chunks() -> None:
    hidden, weight, labels = inputs(24)
    _, whole = chunked_token_log_probs(hidden, weight, labels)
    for chunk_size in (1, 5, 16):
        _, part = chunked_token_log_probs(hidden[:13], weight, labels[:13], chunk_size=chunk_size)
        assert torch.equal(part, whole[:13])


def test_rejects_negative_keep_bytes() -> None:
    hidden, weight, labels = inputs(6)
    with pytest.raises(ValueError, match="keep_bytes must be >= 0, got -1"):
        chunked_token_log_probs(hidden, weight, labels, keep_bytes=-1)
