"""The best tokens of a row with noise, compared with a full sort."""

from __future__ import annotations

import pytest
import torch
from numba import carray

from slipstream.kernels.compiling import kernel
from slipstream.kernels.draw_top import draw_top
from slipstream.kernels.memory import doubles_at, ints_at
from slipstream.sampling.noise import gumbel_noise


@kernel
def _call(scores, tokens, key, position, heat, Z, best, ids, count):  # type: ignore[no-untyped-def]
    draw_top(
        scores, tokens, key, position, heat, Z,
        carray(doubles_at(best), (count,)), carray(ints_at(ids), (count,)),
    )  # fmt: skip


def top(
    row: torch.Tensor,
    key: torch.Tensor,
    heat: float,
    count: int,
    tokens: torch.Tensor | None = None,
) -> tuple[list[float], list[int]]:
    best = torch.empty(count, dtype=torch.float64)
    ids = torch.empty(count, dtype=torch.int64)
    names = 0 if tokens is None else tokens.data_ptr()
    places = best.data_ptr(), ids.data_ptr()
    _call(row.data_ptr(), names, key.data_ptr(), 17, heat, len(row), *places, count)
    return best.tolist(), ids.tolist()


@pytest.mark.parametrize("vocab", [5, 300, 5000])
@pytest.mark.parametrize("spread", [0.1, 3.0, 20.0])
def test_draw_top_equals_the_first_entries_of_a_full_sort(vocab: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(vocab)
    row = spread * torch.randn(vocab, generator=generator)
    key = torch.tensor([[12345, -678]], dtype=torch.int32)
    noisy = row.double() + gumbel_noise(key, torch.tensor([17]), vocab)[0]
    values, order = noisy.sort(descending=True)
    best, ids = top(row, key, 1.0, 8)
    known = min(8, vocab)
    assert ids[:known] == order[:known].tolist()
    torch.testing.assert_close(torch.tensor(best[:known]), values[:known].float())
    assert best[known:] == [-float("inf")] * (8 - known)
    greedy, _ = row.sort(descending=True)
    assert top(row, key, 0.0, 4)[0] == greedy[:4].tolist()


def test_equal_scores_come_in_the_order_of_ids_and_nan_gives_no_tokens() -> None:
    key = torch.tensor([[1, 2]], dtype=torch.int32)
    row = torch.tensor([1.0, 3.0, 3.0, 0.0, 3.0])
    assert top(row, key, 0.0, 4)[1] == [1, 2, 4, 0]
    row[3] = torch.nan
    assert top(row, key, 1.0, 2) == ([-float("inf")] * 2, [4, 4])


@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_noise_depends_on_the_token_ids_of_a_draft_vocabulary(heat: float) -> None:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randperm(5000, generator=generator)[:300].sort().values
    row = torch.full((5000,), -float("inf"))
    row[tokens] = 3 * torch.randn(300, generator=generator)
    key = torch.tensor([[12345, -678]], dtype=torch.int32)
    best, ids = top(row, key, heat, 8)
    assert set(ids) <= set(tokens.tolist())
    assert top(row[tokens].contiguous(), key, heat, 8, tokens) == (best, ids)
