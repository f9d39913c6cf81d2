"""Functions without an LM head take logits, with the results of an explicit identity head."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from slipstream.algorithms.correction import KeptIds, support_log_mass
from slipstream.algorithms.full_kl import chunked_full_kl
from slipstream.algorithms.log_probs import chunked_sum_pi_squared, chunked_token_log_probs

N, D, V = 14, 8, 13
LABELS = torch.arange(N) % V
KEPT = KeptIds.of([[(i + j) % V for j in range(3)] if i % 2 else [] for i in range(N)])

FUNCTIONS: dict[str, Callable[[Tensor, Tensor | None, Tensor, Tensor | None], Tensor]] = {
    "log-probs": lambda h, w, *_: chunked_token_log_probs(h, w, LABELS, 0.7, chunk_size=5)[0],
    "entropies": lambda h, w, *_: chunked_token_log_probs(h, w, LABELS, 0.7, chunk_size=5)[1],
    "kept": lambda h, w, *_: chunked_token_log_probs(h, w, LABELS, keep_bytes=10**6)[0],
    "mass": lambda h, w, *_: support_log_mass(h, w, KEPT, 0.7, chunk_size=5),
    "KL": lambda h, w, r, u: chunked_full_kl(h, w, r, u, 0.7, chunk_size=5),
    "KL forward": lambda h, w, r, u: chunked_full_kl(h, w, r, u, direction="forward"),
}


@pytest.mark.parametrize("name", [*FUNCTIONS, "squares"])
def test_logits_equal_an_identity_head(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, theirs, their_weight = (
        torch.randn(*shape, generator=generator) for shape in ((N, D), (V, D), (N, 4), (V, 4))
    )
    if name == "squares":
        expected = chunked_sum_pi_squared(hidden, weight, 0.7, chunk_size=5)
        found = chunked_sum_pi_squared(hidden @ weight.T, None, 0.7, chunk_size=5)
        torch.testing.assert_close(found, expected)
        return
    outer = torch.randn(N, generator=generator)
    gradients = []
    values = []
    for explicit in (True, False):
        own = hidden.clone().requires_grad_()
        logits = own @ weight.T
        given = (own, weight) if explicit else (logits, None)
        # The reference may have a head or logits, independently of the policy.
        reference = (theirs @ their_weight.T, None) if explicit else (theirs, their_weight)
        before = logits.detach().clone()
        value = FUNCTIONS[name](*given, *reference)
        torch.autograd.backward((value * outer).sum())
        assert torch.equal(logits.detach(), before), "logits are written over"
        assert own.grad is not None
        gradients.append(own.grad)
        values.append(value.detach())
    torch.testing.assert_close(values[1], values[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-5, rtol=1e-5)


def test_rejects_wrong_shapes() -> None:
    logits = torch.zeros(2, 3, 4)
    with pytest.raises(ValueError, match=r"expected logits \(N, V\), got \(2, 3, 4\)"):
        chunked_sum_pi_squared(logits, None)
    with pytest.raises(ValueError, match="2 and 2 rows, 4 and 3 tokens"):
        chunked_full_kl(logits[:, 0], None, logits[:, 0, :3], None)
