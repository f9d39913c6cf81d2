"""Attention over bf16: several rows give the bits of single rows.

This must hold although tiles of several rows may use other instructions.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipstream.kernels.attend_bf16 import BLOCK, attend_bf16

SLOTS = 5 * BLOCK


def attend(q: Tensor, keys: Tensor, values: Tensor, seen: list[int]) -> tuple[Tensor, Tensor]:
    """Return results (M, H * G * K) and log denominators of `q` (H, M, G, K) of one sequence."""
    H, M, G, K = q.shape
    first, count = torch.zeros(M, dtype=torch.int64), torch.tensor(seen)
    out, logs = torch.empty(M, H * G * K), torch.empty(M, H * G)
    table = torch.zeros(1, dtype=torch.int64)
    arrays = [*(t.data_ptr() for t in (q, keys, values, first, count, table)), SLOTS, 0, 0]
    results = (out.data_ptr(), logs.data_ptr())
    attend_bf16(*arrays, SLOTS * K, max(seen), *results, M, H * G, H, K)
    return out, logs


@pytest.mark.parametrize("head_dim", [16, 32, 64])
@pytest.mark.parametrize("group", [1, 2, 3])
@pytest.mark.parametrize("scale", [1.0, 40.0])
def test_several_rows_have_the_bits_of_single_rows(head_dim: int, group: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(head_dim + group)
    keys, values = torch.randn(2, 2, SLOTS, head_dim, generator=generator).bfloat16().unbind()
    # With large scores, all but a few weights are almost zero.
    q = (scale * torch.randn(2, 7, group, head_dim, generator=generator) / 8).bfloat16()
    seen = [60, 61, 62, 100, 127, 128, 129]
    out, logs = attend(q, keys, values, seen)
    for m, n in enumerate(seen):
        alone, log = attend(q[:, m : m + 1].contiguous(), keys, values, [n])
        assert torch.equal(out[m], alone[0])
        assert torch.equal(logs[m], log[0])


@pytest.mark.parametrize("rows", [1, 7])
def test_attention_matches_float64_up_to_rounding(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    keys, values = torch.randn(2, 1, SLOTS, 32, generator=generator).bfloat16().unbind()
    q = (torch.randn(1, rows, 2, 32, generator=generator) / 4).bfloat16()
    seen = list(range(90, 90 + rows))
    out, logs = attend(q, keys, values, seen)
    # Undo the layout: keys in blocks of 16 slots, pair by pair; values in pairs of slots.
    k = keys[0].view(SLOTS // 16, 16, 16, 2).permute(0, 2, 1, 3).reshape(SLOTS, 32).double()
    v = values[0].view(SLOTS // 2, 32, 2).permute(0, 2, 1).reshape(SLOTS, 32).double()
    for m, n in enumerate(seen):
        scores = q[0, m].double() @ k[:n].T
        exact = scores.softmax(-1) @ v[:n]
        torch.testing.assert_close(out[m].view(2, 32).double(), exact, rtol=0, atol=2**-7)
        exact_log = scores.logsumexp(-1)
        torch.testing.assert_close(logs[m].double(), exact_log, rtol=1e-5, atol=1e-5)
