"""Attention over a cache in blocks has the bits of attention over one contiguous block."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from slipstream.kernels.attend import attend
from slipstream.kernels.attend_bf16 import attend_bf16
from slipstream.kernels.move import move_slots

SLOTS = 384
HEADS = 2


def in_layout(keys_HSK: Tensor, values_HSK: Tensor, bf16: bool) -> Tensor:
    """Return keys and values (2, H, S, K) in the layout of the kernel."""
    if not bf16:
        return torch.stack([keys_HSK, values_HSK])
    H, S, K = keys_HSK.shape
    keys = keys_HSK.view(H, S // 16, 16, K // 2, 2).transpose(2, 3)
    values = values_HSK.view(H, S // 2, 2, K).transpose(2, 3)
    return torch.stack([part.reshape(H, S, K) for part in (keys, values)]).bfloat16()


def in_blocks(kv: Tensor, block: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return memory (blocks, 2, H, B, K) in random order, and the offset of each block of `kv`."""
    _, H, S, K = kv.shape
    count = S // block
    # More memory than blocks, so that blocks are not next to each other.
    order = torch.randperm(2 * count, generator=generator)[:count]
    memory = torch.full((2 * count, 2, H, block, K), float("nan"), dtype=kv.dtype)
    memory[order] = kv.view(2, H, count, block, K).permute(2, 0, 1, 3, 4)
    return memory, order * memory[0].numel()


def run(
    q_MHGK: Tensor, memory: Tensor, table: Tensor, seen: list[int], paths: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return results (M, H * G * K) and log denominators (M, H * G)."""
    M, H, G, K = q_MHGK.shape
    bf16, block = memory.dtype == torch.bfloat16, memory.shape[3]
    q = q_MHGK.transpose(0, 1).bfloat16().contiguous() if bf16 else q_MHGK.contiguous()
    out, logs = torch.empty(M, H * G * K), torch.empty(M, H * G)
    # The sequence is the second one of the table.
    first, count = torch.full((M,), 3), torch.tensor(seen)
    table = torch.cat([torch.full((3,), -1), table])
    which: Callable[..., None] = attend_bf16 if bf16 else attend
    path = (0, 0) if paths is None else (paths.data_ptr(), paths.shape[1])
    keys = memory.data_ptr()
    values = keys + memory[0, 0].nbytes
    arrays = [t.data_ptr() for t in (first, count, table)]
    results = (out.data_ptr(), logs.data_ptr())
    which(
        *(q.data_ptr(), keys, values, *arrays, block, *path, block * K, max(seen), *results),
        *(M, H * G, H, K),
    )
    return out, logs


def make(
    bf16: bool, rows: int, group: int, head_dim: int
) -> tuple[torch.Generator, Tensor, Tensor]:
    """Return a generator, queries (M, H, G, K), and keys and values in the layout of the kernel."""
    generator = torch.Generator().manual_seed(rows + group + head_dim)
    keys, values = torch.randn(2, HEADS, SLOTS, head_dim, generator=generator)
    q = torch.randn(rows, HEADS, group, head_dim, generator=generator) / 4
    return generator, q, in_layout(keys, values, bf16)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 16), (2, 64), (3, 32), (4, 48), (20, 32)])
def test_shuffled_blocks_have_the_bits_of_one_block(
    bf16: bool, block: int, group: int, head_dim: int
) -> None:
    # Rows before, at and after the end of each block; every fourth one is computed alone, too.
    edges = [end + step for end in range(block, SLOTS, block) for step in (-1, 0, 1)]
    seen = [1, 31, *edges, SLOTS]
    generator, q, kv = make(bf16, len(seen), group, head_dim)
    whole = run(q, kv[None], torch.zeros(1, dtype=torch.int64), seen, None)
    memory, table = in_blocks(kv, block, generator)
    found = run(q, memory, table, seen, None)
    assert torch.equal(found[0], whole[0])
    assert torch.equal(found[1], whole[1])
    for m in range(0, len(seen), 4):
        alone = run(q[m : m + 1], memory, table, seen[m : m + 1], None)
        assert torch.equal(alone[0][0], whole[0][m])


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("block", [32, 64])
@pytest.mark.parametrize("stem", [1, 31, 32, 60, 63, 64, 65, 127, 190, 256])
def test_tree_paths_through_shuffled_blocks(bf16: bool, block: int, stem: int) -> None:
    # Nodes on the path of each row, as steps after the stem. The first row is in order.
    paths_of = [[0, 1, 2], [0, 3, 7], [4, 9], [5], [1, 2, 6, 8, 11, 40]]
    paths = torch.zeros(len(paths_of), 7, dtype=torch.int64)
    for m, path in enumerate(paths_of):
        paths[m, 0], paths[m, 1 : 1 + len(path)] = stem, stem + torch.tensor(path)
    seen = [stem + len(path) for path in paths_of]
    generator, q, kv = make(bf16, len(seen), 3, 64)
    whole = run(q, kv[None], torch.zeros(1, dtype=torch.int64), seen, paths)
    memory, table = in_blocks(kv, block, generator)
    found = run(q, memory, table, seen, paths)
    assert torch.equal(found[0], whole[0])
    assert torch.equal(found[1], whole[1])


@pytest.mark.parametrize("bf16", [False, True])
def test_slots_move_between_blocks(bf16: bool) -> None:
    generator, _, kv = make(bf16, 1, 1, 32)
    memory, table = in_blocks(kv, 32, generator)
    # Two layers of one block each, in the memory of `BlockStore`: (blocks, L, 2, H, B, K).
    layers = torch.stack([memory, memory.flip(0)], 1).contiguous()
    # The cache is the second row of the table.
    offsets = torch.stack([torch.full_like(table, -1), table * 2])
    offsets[1] += layers.data_ptr() // layers.itemsize
    moves = torch.tensor([[1, 70, 63], [1, 300, 64], [1, 65, 66]])
    before = layers.clone()
    move_slots(
        *(offsets.data_ptr(), len(table), 32, 2, HEADS, 32, layers.itemsize),
        *(moves.data_ptr(), len(moves)),
    )

    def slot(layers: Tensor, number: int) -> Tensor:
        """Return the keys and values (L, 2, H, K) of a slot."""
        block = layers[int(table[number // 32]) // memory[0].numel()]
        at = number % 32
        if not bf16:
            return block[:, :, :, at]
        keys = block[:, 0].view(2, HEADS, 2, 16, 16, 2)[:, :, at // 16, :, at % 16].flatten(2)
        values = block[:, 1].view(2, HEADS, 16, 32, 2)[:, :, at // 2, :, at % 2]
        return torch.stack([keys, values], 1)

    for _, source, target in moves.tolist():
        assert torch.equal(slot(layers, target), slot(before, source))
    assert torch.equal(slot(layers, 67), slot(before, 67))
