"""Sequences that share their first tokens: equal states, and equal gradients up to rounding."""

from __future__ import annotations

import pytest
import torch

from slipstream.kernels.team import kernels_supported
from slipstream.models.decoder import Decoder
from slipstream.models.shared_rows import SharedRows
from tests.models.helpers import config

pytestmark = pytest.mark.skipif(not kernels_supported(), reason="needs the compiled kernels")


def test_rows_of_two_groups() -> None:
    # Sequences AAx, AAyz, Bu, AA, B: the third has another prefix, the fourth nothing of its own.
    lengths, prefixes = [3, 4, 2, 2, 1], [("A", 2), ("A", 2), ("B", 1), ("A", 2), ("B", 1)]
    shared = SharedRows.of(prefixes, lengths)
    assert shared.own == [(0, 0, 3), (3, 5, 2), (5, 7, 2)]
    assert shared.copies == [(0, 3, 2), (0, 9, 2), (5, 11, 1)]
    assert shared.total == 12
    computed = torch.arange(7.0)[:, None]
    rows = shared.all_of(computed)
    assert rows[:, 0].tolist() == [0, 1, 2, 0, 1, 3, 4, 5, 6, 0, 1, 5]
    assert torch.equal(shared.computed_of(rows), computed)


def test_gradients_of_copies_add_up() -> None:
    shared = SharedRows.of([("A", 2), ("A", 2), ("B", 1)], [3, 4, 2])
    for function, size in ((shared.all_of, 7), (shared.computed_of, 9)):
        rows = torch.randn(size, 3, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(function, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("recompute", [False, True])
def test_states_are_equal_and_gradients_close(
    family: str, dtype: torch.dtype, recompute: bool
) -> None:
    decoder = Decoder(config(family, num_layers=2, head_dim=16))
    decoder.init_weights(1)
    generator = torch.Generator().manual_seed(2)
    vocab = decoder.config.vocab_size

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(vocab, (count,), generator=generator)

    prompts = [tokens(40), tokens(5)]
    owners, answers = [0, 1, 0, 0, 1], [7, 30, 1, 13, 2]
    texts = [torch.cat([prompts[o], tokens(n)]) for o, n in zip(owners, answers, strict=True)]
    lengths = [len(text) for text in texts]
    shared = SharedRows.of([(o, len(prompts[o])) for o in owners], lengths)
    assert sum(count for _, _, count in shared.copies) == 2 * 40 + 5
    ids = torch.cat(texts)[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    weights = torch.randn(1, ids.shape[1], decoder.config.hidden_size, generator=generator)

    def states_and_gradients(given: SharedRows | None) -> tuple[torch.Tensor, list[torch.Tensor]]:
        decoder.zero_grad()
        packed = decoder.pack(dtype)
        found = packed.forward(
            ids, positions, lengths=lengths, shared=given, aux_layers=(1,), recompute=recompute
        )
        (found.final * weights).sum().backward()  # type: ignore[no-untyped-call]
        return found.side_by_side().detach(), [
            p.grad.clone() for p in decoder.parameters() if p.grad is not None
        ]

    states, gradients = states_and_gradients(None)
    again, others = states_and_gradients(shared)
    assert torch.equal(states, again)
    with torch.no_grad():
        plain = decoder.pack(dtype).forward(ids, positions, lengths=lengths, shared=shared)
    assert torch.equal(plain.final, states[..., -decoder.config.hidden_size :])
    assert len(gradients) == len(others) > 10
    for ours, theirs in zip(gradients, others, strict=True):
        scale = float(theirs.abs().max())
        tolerance = 1e-5 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * scale)
