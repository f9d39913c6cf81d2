"""CUDA graphs of token sampling give the same tokens and log-probs as sampling without them."""

from __future__ import annotations

import pytest
import torch

from slipstream.inference.engine import choice_graphs
from slipstream.inference.engine.choice_graphs import ChoiceGraphs
from slipstream.sampling.choose import Choice, SamplingRows, choose, first_argmax
from slipstream.sampling.noise import gumbel_noise
from tests.inference.stand_in import MIB, trace

VOCAB = 40
WEIGHT = torch.randn(VOCAB, 16, generator=torch.Generator().manual_seed(1))


def settings(count: int, temperature: float = 1.0, top_k: int = 0) -> SamplingRows:
    return SamplingRows.of(
        [(i, 7) for i in range(count)],
        temperatures=[temperature] * count,
        top_ks=[top_k] * count,
        top_ps=[1.0] * count,
        min_ps=[0.0] * count,
        device=torch.device("cpu"),
    )


def by_torch(hidden: torch.Tensor, positions: torch.Tensor, rows: SamplingRows) -> Choice:
    """Token sampling by torch operations, as on a GPU. The CPU kernel has none to record."""
    log_probs = torch.log_softmax((hidden @ WEIGHT.T)[: len(positions)], -1)
    noise = gumbel_noise(rows.keys_N2, positions, VOCAB)
    tokens = first_argmax(log_probs.double() + noise)
    chosen = log_probs.gather(1, tokens[:, None])[:, 0]
    return Choice(tokens, chosen, chosen / 2)


def states(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states, with three padding rows at the end, and positions."""
    hidden = torch.randn(count + 3, 16, generator=torch.Generator().manual_seed(seed))
    return hidden, torch.arange(count) + 10 * seed


def test_row_counts_of_one_bucket_share_a_recording() -> None:
    graphs = ChoiceGraphs(trace, VOCAB)
    for seed, count in enumerate([5, 6, 5, 6, 5, 5]):
        hidden, positions = states(count, seed)
        rows = settings(count)
        expected = by_torch(hidden, positions, rows)
        found = graphs.choose(by_torch, hidden, positions, rows)
        assert torch.equal(found.tokens, expected.tokens)
        assert found.tokens.dtype == torch.int64
        torch.testing.assert_close(found.log_probs, expected.log_probs)
        torch.testing.assert_close(found.sampling_log_probs, expected.sampling_log_probs)
    assert graphs.replayed == 4
    assert graphs.memory.nbytes == MIB
    # The CPU kernel samples the same tokens.
    logits = (hidden @ WEIGHT.T)[:5]
    assert torch.equal(choose(logits, positions, rows).tokens, found.tokens)
    graphs.clear()
    assert graphs.memory.nbytes == 0


def test_truncated_sampling_and_large_batches_are_not_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choice_graphs, "AT_ONCE", 8 * VOCAB)
    graphs = ChoiceGraphs(trace, VOCAB)
    for _ in range(5):
        for count, top_k in ((4, 3), (9, 0)):
            hidden, positions = states(count, 0)
            graphs.choose(by_torch, hidden, positions, settings(count, top_k=top_k))
    assert graphs.replayed == 0
    for temperature in (1.0, 0.5):
        for _ in range(4):
            graphs.choose(by_torch, *states(4, 0), settings(4, temperature))
    assert graphs.memory.nbytes == 2 * MIB
    assert graphs.replayed == 4
