"""`KVRows` in one rectangle of memory, for torch's operations and CUDA graphs.

Every row has the slots of the longest one (in `kv_blocks` each row has its own length). When a
request ends, the last row is copied to the freed row, so the rows of a shrinking batch stay
contiguous.

Rows and slots grow by doubling, up to a budget in bytes. They grow in place if they fit the
allocated memory. Otherwise they are copied to new memory; both memories exist during the copy.
With `EngineSettings.free_cache_engine`, an idle engine releases the memory.

Shapes: L layers, N rows, H key-value heads, S slots, K head width, M moves, U contexts of a
prefill, W tokens per request, P longest path of a draft tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from math import prod

import numpy as np
import torch
from torch import Tensor

from slipstream.inference.engine.kv_rows import KVPrefix, block_aligned
from slipstream.models.attention import Context, KVCache, as_context, padded_keys
from slipstream.models.config import ModelConfig
from slipstream.models.numerics import (
    KEY_CHUNK,
    WIDTH_MULTIPLE,
    key_step,
    round_up,
)

SLOT_STEP = 64
"""The number of slots of a row is a multiple of this."""


class KVStore:
    """The memory of the KV cache, `data` (L, 2, N, H, S, K), and copies of rows and slots."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        budget_bytes: int,
        *,
        row_multiple: int = 1,
        before_growth: Callable[[int], None] | None = None,
    ) -> None:
        """Rows are allocated in multiples of `row_multiple`. `before_growth` is called with the
        new size in bytes before the store grows, so that others can free parts of the budget."""
        self._config = config
        self._dtype = dtype
        self._device = device
        self.budget = budget_bytes
        self._row_multiple = row_multiple
        self._before_growth = before_growth
        self._memory: Tensor
        self.data: Tensor
        self.release()

    @property
    def rows(self) -> int:
        return self.data.shape[2]

    @property
    def slots(self) -> int:
        return self.data.shape[4]

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of the keys and values of one token."""
        c = self._config
        return c.num_layers * 2 * c.num_kv_heads * c.head_dim * self._dtype.itemsize

    def size(self, lengths: Sequence[int]) -> int:
        """Return the bytes that contexts of these lengths need: each as much as the longest."""
        rows = round_up(len(lengths), self._row_multiple)
        return rows * self._slots(max(lengths)) * self.slot_bytes

    def fits(self, lengths: Sequence[int]) -> bool:
        """Return whether the budget holds contexts of these lengths."""
        return self.size(lengths) <= self.budget

    def reserve(self, lengths: Sequence[int]) -> None:
        """Make room for contexts of these lengths. The contents of these rows are kept. The caller
        must have checked `fits`."""
        rows = round_up(len(lengths), self._row_multiple)
        slots = self._slots(max(lengths))
        if rows <= self.rows and slots <= self.slots:
            return
        new_rows, new_slots = self._grown(rows, slots)
        old, needed = self.data, new_rows * new_slots * self.slot_bytes
        if needed > self._memory.nbytes:
            if self._before_growth is not None:
                self._before_growth(needed)
            # Zeros, because attention multiplies unwritten slots by weight 0, and 0 * NaN is NaN.
            self._memory = torch.zeros(
                needed // self._dtype.itemsize, dtype=self._dtype, device=self._device
            )
        self.data = self._view(new_rows, new_slots)
        n, s = min(old.shape[2], rows), min(old.shape[4], slots)
        # Old and new layout may share memory. In this order no layer is overwritten before it has
        # been copied.
        layers = range(len(old))
        for layer in layers if old.numel() >= self.data.numel() else reversed(layers):
            self.data[layer, :, :n, :, :s] = old[layer, :, :n, :, :s].clone()

    def _grown(self, rows: int, slots: int) -> tuple[int, int]:
        """Rows and slots to allocate if at least these are needed. They are more than needed, so
        that copies are rare."""
        more_rows = self.rows if rows <= self.rows else max(rows, 2 * self.rows)
        if slots > self.slots:
            # Contexts are longest when few requests are left, so rows of ended requests are
            # dropped here.
            more_rows = min(more_rows, 2 * rows)
        allocated = self._memory.nbytes // self.slot_bytes
        if rows * slots <= allocated:
            most = allocated // slots
            more_rows = min(more_rows, most - most % self._row_multiple)
            more_slots = allocated // more_rows
            return more_rows, more_slots - more_slots % self._slots(1)
        more_slots = self.slots if slots <= self.slots else max(slots, 2 * self.slots)
        # Near the budget, allocate exactly what is needed.
        within = more_rows * more_slots * self.slot_bytes <= self.budget
        return (more_rows, more_slots) if within else (rows, slots)

    def prefix_size(self, length: int) -> int:
        """Bytes of a copy of the first `length` tokens of a row."""
        return block_aligned(length) * self.slot_bytes

    def end(self, row: int, last: int, length: int) -> None:
        """Free `row`. The first `length` slots of row `last` move to it if it is another row."""
        if row != last and length:
            self.share(last, row, length)

    def share(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` slots of row `source` to row `target`."""
        length = block_aligned(length)
        self.data[:, :, target, :, :length] = self.data[:, :, source, :, :length]

    def move_slots(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Copy keys and values within rows, in the given order.

        Each move is (row, source slot, target slot). No move may read a slot that an earlier move
        has written.
        """
        layers, _, rows, heads, slots, width = self.data.shape
        # Two operations over all layers at once, with (row, head, slot) as one dimension.
        row_M, source_M, target_M = np.array(moves).T
        first_MH = (row_M[:, None] * heads + np.arange(heads)) * slots
        index = [(first_MH + slot_M[:, None]).ravel() for slot_M in (source_M, target_M)]
        source, target = torch.from_numpy(np.stack(index)).to(self._device)
        lines = self.data.view(2 * layers, rows * heads * slots, width)
        lines.index_copy_(1, target, lines.index_select(1, source))

    def view_prefix(self, row: int, length: int) -> KVPrefix:
        """The first `length` tokens of a row, as a view."""
        return KVPrefix((self.data[:, :, row, :, : block_aligned(length)],), length)

    def restore(self, row: int, prefix: KVPrefix) -> None:
        """Copy keys and values to the beginning of a row."""
        (part,) = prefix.parts
        self.data[:, :, row, :, : part.shape[3]] = part

    def clear(self, row: int) -> None:
        """Zero a row that may hold NaN, because 0 * NaN is NaN for the next request in the row."""
        self.data[:, :, row].zero_()

    def release(self) -> None:
        """Free the memory. The contents are lost."""
        self._memory = torch.zeros(0, dtype=self._dtype, device=self._device)
        self.data = self._view(0, 0)

    def prefill(
        self, rows: Sequence[int], sources: Sequence[int], lengths: Sequence[int], width: int
    ) -> tuple[KVCache, Callable[[], None]]:
        """Return the cache of a prefill. Nothing remains to be done after it."""
        del lengths
        return PrefillView(self, rows, sources, width), lambda: None

    def extend(
        self, rows: Sequence[int], starts: Sequence[int], counts: Sequence[int], width: int
    ) -> KVCache:
        """Return the cache of a prefill that continues contexts, as `KVRows` says."""
        return ExtendView(self, rows, starts, counts, width)

    def decode(
        self, slots_NW: Tensor, longest: int, shortest: int, paths_NWP: Tensor | None
    ) -> KVCache:
        """Return the cache of a decode step of rows 0 to N-1, as `KVRows` says."""
        return DecodeView(self, slots_NW, longest, shortest, paths_NWP)

    def _slots(self, length: int) -> int:
        """Slots to allocate for `length` tokens: a few more, so that slots seldom have to grow."""
        step = max(SLOT_STEP, key_step(self._dtype, self._device))
        return round_up(max(length, 1), step)

    def _view(self, rows: int, slots: int) -> Tensor:
        c = self._config
        shape = (c.num_layers, 2, rows, c.num_kv_heads, slots, c.head_dim)
        return self._memory[: prod(shape)].view(shape)


class PrefillView:
    """`KVCache` of a prefill of whole contexts. Each context goes to every row that shares it.

    `rows` are the rows to fill, and `sources` the index of the context of each of them. Every
    context has at least one row.
    """

    paths = None

    def __init__(
        self, store: KVStore, rows: Sequence[int], sources: Sequence[int], length: int
    ) -> None:
        self._store = store
        self._rows = torch.tensor(rows, device=store.data.device)
        self._sources = torch.tensor(sources, device=store.data.device)
        self._length = length

    @property
    def num_keys(self) -> int:
        data = self._store.data
        return padded_keys(self._length, data.dtype, data.device)

    @property
    def num_seen(self) -> int:
        return 0

    def extend(self, layer: int, k_BTHK: Tensor, v_BTHK: Tensor) -> Context:
        fresh = torch.stack([k_BTHK, v_BTHK]).transpose(2, 3)
        block = self._store.data[layer]
        block[:, self._rows, :, : self._length] = fresh[:, self._sources]
        missing = self.num_keys - self._length
        padded = torch.nn.functional.pad(fresh, (0, 0, 0, missing)) if missing else fresh
        keys, values = padded.flatten(1, 2)
        return as_context(keys, values)


class ExtendView:
    """`KVCache` of a prefill that continues contexts whose first tokens are cached.

    Context i is in row `rows[i]`. Its first `starts[i]` slots are filled, and `counts[i]` of the W
    new tokens follow. The other new tokens are padding: they are not stored, and no token attends
    to them.
    """

    paths = None

    def __init__(
        self,
        store: KVStore,
        rows: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        width: int,
    ) -> None:
        device = store.data.device
        self._store = store
        self._num_seen = min(starts) - min(starts) % WIDTH_MULTIPLE
        self._longest = max(start + count for start, count in zip(starts, counts, strict=True))
        self._rows = torch.tensor(rows, device=device)
        self._starts = torch.tensor(starts, device=device)
        self._columns = torch.arange(width, device=device)
        self._new_UW = self._columns < torch.tensor(counts, device=device)[:, None]

    @property
    def num_keys(self) -> int:
        return padded_keys(self._longest, self._store.data.dtype, self._store.data.device)

    @property
    def num_seen(self) -> int:
        return self._num_seen

    @cached_property
    def _targets(self) -> tuple[Tensor, Tensor]:
        """Row and slot of each new token, without padding."""
        source_M, offset_M = self._new_UW.nonzero().unbind(1)
        return self._rows[source_M], self._starts[source_M] + offset_M

    def extend(self, layer: int, k_BTHK: Tensor, v_BTHK: Tensor) -> Context:
        block = self._store.data[layer]
        fresh = torch.stack([k_BTHK[self._new_UW], v_BTHK[self._new_UW]], dim=1)
        row_M, slot_M = self._targets
        block.permute(1, 3, 0, 2, 4)[row_M, slot_M] = fresh
        keys, values = block[:, self._rows, :, : self.num_keys].flatten(1, 2)
        return as_context(keys, values)


class DecodeView:
    """`KVCache` of one decode step: rows 0 to N-1, with their new tokens in `slots_NW`.

    `length` is the length of the longest context including all new tokens. `shortest` is the length
    of the shortest context up to and including its first new token. `paths_NWP` are the paths of
    draft trees, as `kernels.tree_paths` defines them; None without trees.
    """

    def __init__(
        self,
        store: KVStore,
        slots_NW: Tensor,
        length: int,
        shortest: int,
        paths_NWP: Tensor | None = None,
    ) -> None:
        self.paths = paths_NWP
        self._store = store
        self._slots_NW = slots_NW
        self._length = length
        self._shortest = shortest

    @property
    def num_keys(self) -> int:
        return padded_keys(self._length, self._store.data.dtype, self._store.data.device)

    @property
    def num_seen(self) -> int:
        return self._shortest - self._shortest % WIDTH_MULTIPLE

    @cached_property
    def _contexts(self) -> list[Context]:
        # The views of all layers are made at once. One by one they would take as long as the small
        # operations of a step.
        layers, _, rows, heads, slots, width = self._store.data.shape
        matrices = self._store.data.view(layers, 2, rows * heads, slots, width)
        n = len(self._slots_NW)
        keys, values = matrices[:, :, : n * heads, : self.num_keys].unbind(1)
        chunks = (c.unbind() for c in torch.split(values, KEY_CHUNK[values.dtype], dim=2))
        return list(map(Context, keys.transpose(2, 3).unbind(), zip(*chunks, strict=True)))

    @cached_property
    def _lines(self) -> tuple[Tensor, ...]:
        data = self._store.data
        return data.view(len(data), -1, data.shape[-1]).unbind()

    @cached_property
    def _index(self) -> Tensor:
        """Flat indices of (key or value, row, head, slot) in one layer viewed as (2*N*H*S, K). They
        are ordered as the new keys and values: by row, token, head."""
        _, _, rows, heads, slots, _ = self._store.data.shape
        device = self._slots_NW.device
        line = torch.arange(len(self._slots_NW), device=device)[:, None, None] * heads
        line = (line + torch.arange(heads, device=device)) * slots
        first = (line + self._slots_NW[:, :, None]).reshape(-1)
        return torch.cat([first, first + rows * heads * slots])

    def extend(self, layer: int, k_BTHK: Tensor, v_BTHK: Tensor) -> Context:
        fresh = torch.cat([k_BTHK, v_BTHK]).view(-1, k_BTHK.shape[-1])
        self._lines[layer].index_copy_(0, self._index, fresh)
        return self._contexts[layer]
