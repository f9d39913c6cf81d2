"""Keys and values of the running requests in blocks, for the compiled kernels.

A row is a list of blocks of `BLOCK_SLOTS` slots. So a request takes the memory of its own length,
rounded up to a whole block, whatever the lengths of the others. Blocks are allocated in slabs and
reused when their rows end. Rows can share the whole blocks of a common prompt.

Shapes as in `kv_rows`; B slots of a block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

import numpy as np
import torch
from torch import Tensor

from slipstream.inference.engine.kv_rows import KVPrefix, block_aligned
from slipstream.kernels.move import move_slots
from slipstream.models.config import ModelConfig
from slipstream.models.cpu_attention import KeyBlocks, KeyPlaces

BLOCK_SLOTS = 64
"""Slots of a block: a multiple of `SLOT_BLOCK`. Smaller blocks waste less memory in the last block
of a row, larger ones take less time in the kernels."""

SLAB_SHARE = 32
"""A new slab has at least 1/32 of the blocks that are allocated so far, if the budget allows."""


class BlockStore:
    """`KVRows` in blocks. Each block is one piece of memory, (L, 2, H, B, K)."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        budget_bytes: int,
        *,
        before_growth: Callable[[int], None] | None = None,
        block: int = BLOCK_SLOTS,
    ) -> None:
        """`before_growth` is called with the new size in bytes before the store grows, so that
        others can free parts of the budget."""
        c = config
        self._shape = (c.num_layers, 2, c.num_kv_heads, block, c.head_dim)
        self._dtype = dtype
        self._block = block
        self._block_bytes = prod(self._shape) * dtype.itemsize
        self.budget = budget_bytes
        self._before_growth = before_growth
        # Absolute offsets in numbers of the blocks of each row, and all of them as an array.
        self._rows: list[list[int]]
        self._table = np.zeros((1, 1), np.int64)
        self._slabs: list[Tensor]
        self._memory: dict[int, Tensor]
        self._free: list[int]
        # Number of rows that use each block; blocks that may hold NaN.
        self._uses: Counter[int]
        self._dirty: set[int]
        self.release()

    @property
    def nbytes(self) -> int:
        return len(self._memory) * self._block_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of the keys and values of one token."""
        return self._block_bytes // self._block

    def size(self, lengths: Sequence[int]) -> int:
        """Return the bytes that contexts of these lengths need in an empty store."""
        return sum(map(self._count, lengths)) * self._block_bytes

    def _count(self, length: int) -> int:
        return -(-length // self._block)

    def fits(self, lengths: Sequence[int]) -> bool:
        """Return whether the budget holds contexts of these lengths in rows 0, 1, and so on.

        Blocks that a row had for rejected drafts, and needs no longer, count as free.
        """
        room = len(self._free) + max(0, self.budget - self.nbytes) // self._block_bytes
        return sum(self._lacking(lengths)) <= room

    def _lacking(self, lengths: Sequence[int]) -> list[int]:
        """Return the number of blocks that each row lacks; below 0: that it has too many."""
        have = [len(row) for row in self._rows[: len(lengths)]]
        have += [0] * (len(lengths) - len(have))
        return [self._count(length) - count for length, count in zip(lengths, have, strict=True)]

    def reserve(self, lengths: Sequence[int]) -> None:
        """Make room for contexts of these lengths in rows 0, 1, and so on; keep their contents."""
        lacking = self._lacking(lengths)
        self._rows.extend([] for _ in range(len(lengths) - len(self._rows)))
        missing = sum(count for count in lacking if count > 0)
        if not missing:
            return
        if missing > len(self._free):
            self._take_back(lacking)
        if missing > len(self._free):
            self._allocate(missing - len(self._free))
        for row, count in enumerate(lacking):
            if count > 0:
                new = [self._free.pop() for _ in range(count)]
                self._uses.update(new)
                self._rows[row] += new
                self._write_row(row)

    def _take_back(self, lacking: Sequence[int]) -> None:
        """Free the blocks at the ends of rows that have too many: those of rejected drafts."""
        for row, count in enumerate(lacking):
            if count < 0:
                blocks = self._rows[row]
                self._drop(blocks[count:])
                del blocks[count:]

    def _allocate(self, count: int) -> None:
        """Allocate a slab of at least `count` blocks, and more if the budget allows."""
        most = (self.budget - self.nbytes) // self._block_bytes
        count = max(count, min(len(self._memory) // SLAB_SHARE, most))
        if self._before_growth is not None:
            self._before_growth(self.nbytes + count * self._block_bytes)
        # Offsets of blocks are multiples of the size of a head, as the bf16 layout requires.
        # Zeros, because attention multiplies unwritten slots by weight 0, and 0 * NaN is NaN.
        head = prod(self._shape[3:]) * self._dtype.itemsize
        slab = torch.zeros(count * self._block_bytes + head, dtype=torch.uint8)
        skipped = -slab.data_ptr() % head
        blocks = slab[skipped : skipped + count * self._block_bytes].view(self._dtype)
        first, numbers = blocks.data_ptr() // self._dtype.itemsize, prod(self._shape)
        new = {
            first + i * numbers: memory
            for i, memory in enumerate(blocks.view(count, *self._shape).unbind())
        }
        self._slabs.append(slab)
        self._memory.update(new)
        # The next block is taken from the end.
        self._free.extend(reversed(new))

    def _write_row(self, row: int) -> None:
        """Copy a row's blocks to the table, which grows by doubling."""
        blocks = self._rows[row]
        rows, entries = self._table.shape
        if row >= rows or len(blocks) > entries:
            larger = np.zeros(
                (
                    rows if row < rows else max(row + 1, 2 * rows),
                    entries if len(blocks) <= entries else max(len(blocks), 2 * entries),
                ),
                np.int64,
            )
            larger[:rows, :entries] = self._table
            self._table = larger
        self._table[row, : len(blocks)] = blocks

    def end(self, row: int, last: int, length: int) -> None:
        """Free `row`, and move row `last` to it if it is another row. Nothing is copied."""
        del length
        if row >= len(self._rows):
            return  # Nothing was reserved for it.
        self._drop(self._rows[row])
        moved = self._rows.pop(last) if last < len(self._rows) else []
        if row != last:
            self._rows[row] = moved
            self._write_row(row)

    def _drop(self, blocks: Sequence[int]) -> None:
        """Free the blocks that no other row uses."""
        for block in reversed(blocks):
            self._uses[block] -= 1
            if self._uses[block]:
                continue
            del self._uses[block]
            if block in self._dirty:
                self._memory[block].zero_()
                self._dirty.remove(block)
            self._free.append(block)

    def share(self, source: int, target: int, length: int) -> None:
        """Give row `target` the first `length` slots of row `source`.

        Both rows use the same memory for whole blocks, to which no row writes again. The slots
        after them are copied.
        """
        whole = length // self._block
        before, after = self._rows[source], self._rows[target]
        self._drop(after[:whole])
        after[:whole] = before[:whole]
        self._uses.update(before[:whole])
        self._write_row(target)
        rest = block_aligned(length - whole * self._block)
        if rest:
            into, of = self._memory[after[whole]], self._memory[before[whole]]
            into[:, :, :, :rest] = of[:, :, :, :rest]

    def move_slots(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Copy keys and values within rows, in the given order, as `KVRows` says."""
        layers, _, heads, _, width = self._shape
        moves_M3 = torch.tensor(moves)
        entries = self._table.shape[1]
        move_slots(
            *(self._table.ctypes.data, entries, self._block),
            *(layers, heads, width, self._dtype.itemsize),
            *(moves_M3.data_ptr(), len(moves)),
        )

    def prefix_size(self, length: int) -> int:
        """Return the bytes of a copy of the first `length` tokens of a row."""
        return block_aligned(length) * self.slot_bytes

    def view_prefix(self, row: int, length: int) -> KVPrefix:
        """Return the first `length` tokens of a row, as views."""
        blocks = self._rows[row][: self._count(length)]
        return KVPrefix(tuple(self._memory[block] for block in blocks), length).first(length)

    def restore(self, row: int, prefix: KVPrefix) -> None:
        """Copy keys and values, which come from a store with equal blocks, to a row's beginning."""
        for block, part in zip(self._rows[row], prefix.parts, strict=False):
            self._memory[block][:, :, :, : part.shape[3]] = part

    def clear(self, row: int) -> None:
        """Note that a row may hold NaN, because 0 * NaN is NaN.

        Its blocks are zeroed when the last row that uses them ends.
        """
        self._dirty.update(self._rows[row])

    def release(self) -> None:
        """Free the memory and all rows. The contents are lost."""
        self._rows, self._slabs, self._memory, self._free = [], [], {}, []
        self._uses, self._dirty = Counter(), set()

    @property
    def blocks(self) -> KeyBlocks:
        """The locations of all rows, valid until the next change of rows or blocks."""
        _, _, heads, block, width = self._shape
        # Offsets are absolute, so that blocks of several slabs have one base.
        values = heads * block * width * self._dtype.itemsize
        return KeyBlocks(
            table=torch.from_numpy(self._table),
            block=block,
            head_stride=block * width,
            width=width,
            keys=0,
            values=values,
            layer_step=2 * values,
            data=self._slabs,
        )

    def prefill(
        self, rows: Sequence[int], sources: Sequence[int], lengths: Sequence[int], width: int
    ) -> tuple[KeyPlaces, Callable[[], None]]:
        """Return the cache of a prefill, and a function to call after it.

        The prefill fills one row of each context. The function shares that row with the other rows
        of the context.
        """
        row_of = dict(zip(reversed(sources), reversed(rows), strict=True))
        own = [row_of[context] for context in range(len(lengths))]
        cache = self.extend(own, [0] * len(own), lengths, width)

        def finish() -> None:
            for row, context in zip(rows, sources, strict=True):
                if row != row_of[context]:
                    self.share(row_of[context], row, lengths[context])

        return cache, finish

    def extend(
        self, rows: Sequence[int], starts: Sequence[int], counts: Sequence[int], width: int
    ) -> KeyPlaces:
        """Return the cache of a prefill that continues contexts, as `KVRows` says."""
        columns = torch.arange(width)
        new_UW = columns < torch.tensor(counts)[:, None]
        # Padding attends to the first slot and is not stored.
        slots_UW = (torch.tensor(starts)[:, None] + columns).where(new_UW, 0)
        rows_UW = torch.tensor(rows)[:, None].expand_as(slots_UW)
        longest = max(start + count for start, count in zip(starts, counts, strict=True))
        found = self.blocks.places(rows_UW.flatten(), slots_UW.flatten(), longest)
        return replace(found, own_M=found.own_M.where(new_UW.flatten(), -1))

    def decode(
        self, slots_NW: Tensor, longest: int, shortest: int, paths_NWP: Tensor | None
    ) -> KeyPlaces:
        """Return the cache of a decode step of rows 0 to N-1 without trees, as `KVRows` says."""
        assert paths_NWP is None, "trees have rows of their own (`decode_rows`)"
        N, W = slots_NW.shape
        rows_M = torch.arange(N).repeat_interleave(W)
        return self.blocks.places(rows_M, slots_NW.flatten(), longest)

    def decode_rows(
        self,
        rows_M: Tensor,
        slots_M: Tensor,
        positions_M: Tensor,
        paths: Tensor | None,
        longest: int,
    ) -> KeyPlaces:
        """Return the cache of a decode step whose requests have different numbers of new tokens.

        Token m is in slot `slots_M[m]` of row `rows_M[m]`, at position `positions_M[m]`, and
        attends to the slots that `paths` gives (`kernels.tree_paths`). `longest` is the length of
        the longest context including all new tokens.
        """
        found = self.blocks.places(rows_M, slots_M, longest)
        return replace(found, seen_M=positions_M + 1, paths=paths)
