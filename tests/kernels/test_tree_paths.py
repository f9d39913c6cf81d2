"""Attention along the paths of a draft tree.

A node must have the bits that it would have if the tokens on its path were a plain sequence.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from slipstream.kernels.attend import attend
from slipstream.kernels.attend_bf16 import attend_bf16

SLOTS = 160
PARENTS = (-1, 0, 0, 1, 1, 2, 3, 3, 5, 8, 6, 10, 11)
"""Parents of the nodes of a tree. The nodes of the longest path, 0, 1, 3, 6, 10, 11, 12, are not in
the slots of their positions."""


def path_to(node: int) -> list[int]:
    """Return the nodes on the path to a node, without the root."""
    found = []
    while node > 0:
        found.append(node)
        node = PARENTS[node]
    return found[::-1]


def packed(keys_HSK: Tensor, values_HSK: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values in bf16, in the layout of `attend_bf16`."""
    H, S, K = keys_HSK.shape
    keys = keys_HSK.view(H, S // 16, 16, K // 2, 2).transpose(2, 3)
    values = values_HSK.view(H, S // 2, 2, K).transpose(2, 3)
    return keys.bfloat16().contiguous(), values.bfloat16().contiguous()


def run(
    q_MHGK: Tensor, kv: tuple[Tensor, Tensor], seen: list[int], paths: Tensor | None
) -> tuple[Tensor, Tensor]:
    M, H, G, K = q_MHGK.shape
    keys, values = kv
    bf16 = keys.dtype == torch.bfloat16
    q = q_MHGK.transpose(0, 1).bfloat16().contiguous() if bf16 else q_MHGK.contiguous()
    out, logs = torch.empty(M, H * G * K), torch.empty(M, H * G)
    first, count = torch.zeros(M, dtype=torch.int64), torch.tensor(seen)
    which: Callable[..., None] = attend_bf16 if bf16 else attend
    path = (0, 0) if paths is None else (paths.data_ptr(), paths.shape[1])
    table = torch.zeros(1, dtype=torch.int64)
    addresses = [t.data_ptr() for t in (q, keys, values, first, count, table)]
    results = (out.data_ptr(), logs.data_ptr())
    which(*addresses, SLOTS, *path, SLOTS * K, SLOTS, *results, M, H * G, H, K)
    return out, logs


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stem", [1, 20, 31, 32, 33, 63, 64, 127])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 16), (2, 64), (3, 32), (4, 48), (20, 32)])
def test_a_node_has_the_bits_of_its_path_as_a_sequence(
    bf16: bool, stem: int, group: int, head_dim: int
) -> None:
    generator = torch.Generator().manual_seed(stem + group)
    H, M = 2, len(PARENTS)
    keys, values = torch.randn(2, H, SLOTS, head_dim, generator=generator)
    q = torch.randn(M, H, group, head_dim, generator=generator) / 4
    # The root is the last token of the stem.
    slots = torch.arange(M) + stem - 1
    longest = max(len(path_to(node)) for node in range(M))
    paths = torch.zeros(M, 1 + longest, dtype=torch.int64)
    for node in range(M):
        own = slots[path_to(node)]
        paths[node, 0], paths[node, 1 : 1 + len(own)] = stem, own
    seen = [stem + len(path_to(node)) for node in range(M)]
    cache = packed(keys, values) if bf16 else (keys, values)
    out, logs = run(q, cache, seen, paths)
    for node in range(M):
        order = torch.arange(SLOTS)
        own = slots[path_to(node)]
        order[stem : stem + len(own)] = own
        moved = keys[:, order].contiguous(), values[:, order].contiguous()
        sequence = packed(*moved) if bf16 else moved
        alone, log = run(q[node, None], sequence, seen[node : node + 1], None)
        assert torch.equal(out[node], alone[0]), node
        assert torch.equal(logs[node], log[0])
