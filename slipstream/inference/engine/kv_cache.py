"""Keys and values of the running requests: contiguous, one row per request, dense from row 0.

A row is a request's whole context: slot s holds position s. When a request ends the last row moves
into its place, so a shrinking batch stays dense. Rows and slots grow by doubling up to a budget in
bytes (while they are copied, old and new exist), and within memory that is there already in place;
the engine gives it back when it runs out of work, if it is to.
Shapes: L layers, N rows, H key-value heads, S slots, K head width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels.move import move_slots
from slipstream.models.attention import Context, as_context, padded_keys
from slipstream.models.config import ModelConfig
from slipstream.models.cpu_attention import SLOT_BLOCK, KeyPlaces
from slipstream.models.decoder import supports_varlen
from slipstream.models.numerics import (
    KEY_CHUNK,
    WIDTH_MULTIPLE,
    key_step,
    round_up,
)

SLOT_STEP = 64
"""Slots of a row come in this many."""


def _whole(length: int) -> int:
    """Slots to copy so that the first `length` are among them."""
    return round_up(length, SLOT_BLOCK)


@dataclass(frozen=True, slots=True)
class KVPrefix:
    """Keys and values of the first tokens of a context."""

    data: Tensor
    """(L, 2, H, S, K), whole blocks of slots."""
    length: int
    """How many of the slots mean something."""

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def first(self, length: int) -> KVPrefix:
        """Those of fewer tokens."""
        return KVPrefix(self.data[:, :, :, : _whole(length)], length)


class KVStore:
    """The tensors (L, 2, N, H, S, K), and moving rows in them."""

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
        """Rows are allocated in multiples of `row_multiple`. `before_growth` is told how many bytes
        the store will take, so that who shares its budget can make way."""
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
        """Bytes of one token in one row."""
        c = self._config
        return c.num_layers * 2 * c.num_kv_heads * c.head_dim * self._dtype.itemsize

    def size(self, rows: int, length: int) -> int:
        """Bytes that `rows` contexts of `length` tokens take."""
        return round_up(rows, self._row_multiple) * self._slots(length) * self.slot_bytes

    def fits(self, rows: int, length: int) -> bool:
        """Whether the budget holds `rows` contexts of `length` tokens."""
        return self.size(rows, length) <= self.budget

    def reserve(self, rows: int, length: int) -> None:
        """Make room for the first `rows` contexts, none of them longer than `length`; what they
        have stored stays. The caller has asked `fits`."""
        rows = round_up(rows, self._row_multiple)
        slots = self._slots(length)
        if rows <= self.rows and slots <= self.slots:
            return
        new_rows, new_slots = self._grown(rows, slots)
        old, wanted = self.data, new_rows * new_slots * self.slot_bytes
        if wanted > self._memory.nbytes:
            if self._before_growth is not None:
                self._before_growth(wanted)
            # Zeros: an unwritten slot has weight zero, and 0 * NaN would still be NaN.
            self._memory = torch.zeros(
                wanted // self._dtype.itemsize, dtype=self._dtype, device=self._device
            )
        self.data = self._view(new_rows, new_slots)
        n, s = min(old.shape[2], rows), min(old.shape[4], slots)
        # In place, by layers, in the order in which none is written over before its turn.
        layers = range(len(old))
        for layer in layers if old.numel() >= self.data.numel() else reversed(layers):
            self.data[layer, :, :n, :, :s] = old[layer, :, :n, :, :s].clone()

    def _grown(self, rows: int, slots: int) -> tuple[int, int]:
        """Rows and slots to have next where so many are needed: more, for copies should be rare."""
        more_rows = self.rows if rows <= self.rows else max(rows, 2 * self.rows)
        if slots > self.slots:
            # Contexts grow longest when few are left: rows that have ended are not taken along.
            more_rows = min(more_rows, 2 * rows)
        there = self._memory.nbytes // self.slot_bytes
        if rows * slots <= there:
            most = there // slots
            more_rows = min(more_rows, most - most % self._row_multiple)
            more_slots = there // more_rows
            return more_rows, more_slots - more_slots % self._slots(1)
        more_slots = self.slots if slots <= self.slots else max(slots, 2 * self.slots)
        # Near the budget take exactly what is needed.
        within = more_rows * more_slots * self.slot_bytes <= self.budget
        return (more_rows, more_slots) if within else (rows, slots)

    def kept_size(self, length: int) -> int:
        """Bytes of what `take` copies."""
        return _whole(length) * self.slot_bytes

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` slots of one row over another."""
        length = _whole(length)
        self.data[:, :, target, :, :length] = self.data[:, :, source, :, :length]

    def move_slots(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Copy keys and values within their rows, in the given order: row, slot, and slot to copy
        them to. No slot is read after it was written."""
        layers, _, rows, heads, slots, width = self.data.shape
        if not supports_varlen(self._config, self._dtype, self._device):
            # As lines of one layer's keys or values: two operations, each over all layers.
            row_M, source_M, target_M = np.array(moves).T
            first_MH = (row_M[:, None] * heads + np.arange(heads)) * slots
            index = [(first_MH + slot_M[:, None]).ravel() for slot_M in (source_M, target_M)]
            source, target = torch.from_numpy(np.stack(index)).to(self._device)
            lines = self.data.view(2 * layers, rows * heads * slots, width)
            lines.index_copy_(1, target, lines.index_select(1, source))
            return
        wanted = torch.tensor(moves)
        move_slots(
            self.data.data_ptr(),
            *(layers, rows, heads, slots, width, self._dtype.itemsize),
            *(wanted.data_ptr(), len(moves)),
        )

    def look(self, row: int, length: int) -> KVPrefix:
        """The beginning of a row, as long as nothing is written there."""
        return KVPrefix(self.data[:, :, row, :, : _whole(length)], length)

    def take(self, row: int, length: int) -> KVPrefix:
        """A copy of the beginning of a row: what a set-aside request keeps."""
        return KVPrefix(self.look(row, length).data.clone(), length)

    def put(self, row: int, kept: KVPrefix) -> None:
        """Bring a set-aside row back."""
        self.data[:, :, row, :, : kept.data.shape[3]] = kept.data

    def clear(self, row: int) -> None:
        """Zero a row that may hold NaN: 0 * NaN would reach the row's next user."""
        self.data[:, :, row].zero_()

    def release(self) -> None:
        """Give all memory back; nothing stored is kept."""
        self._memory = torch.zeros(0, dtype=self._dtype, device=self._device)
        self.data = self._view(0, 0)

    def _slots(self, length: int) -> int:
        """Some in reserve, so that a row's slots seldom need to grow."""
        step = max(SLOT_STEP, key_step(self._dtype, self._device))
        return round_up(max(length, 1), step)

    def _view(self, rows: int, slots: int) -> Tensor:
        c = self._config
        shape = (c.num_layers, 2, rows, c.num_kv_heads, slots, c.head_dim)
        return self._memory[: prod(shape)].view(shape)


class PrefillView:
    """`PlacedKVCache` of a prefill: new contexts only, each written to every row that shares it.

    `rows` are the rows to fill and `sources` the index of the context for each; every context has a
    row, and with `places` the other rows get it from there in `finish`.
    """

    paths = None

    def __init__(
        self, store: KVStore, rows: Sequence[int], sources: Sequence[int], length: int
    ) -> None:
        self._store = store
        self._rows = torch.tensor(rows, device=store.data.device)
        self._sources = torch.tensor(sources, device=store.data.device)
        self._length = length
        self._copies: tuple[Tensor, Tensor] | None = None

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

    def places(self) -> KeyPlaces:
        rows, sources = self._rows.tolist(), self._sources.tolist()
        row_of = dict(zip(reversed(sources), reversed(rows), strict=True))
        copied = [
            (row, row_of[i]) for row, i in zip(rows, sources, strict=True) if row != row_of[i]
        ]
        if copied:
            self._copies = torch.tensor(copied).unbind(1)  # type: ignore[assignment]
        own = torch.tensor([row_of[i] for i in range(len(row_of))])
        slots = torch.arange(self._length).repeat(len(own))
        row_M = own.repeat_interleave(self._length)
        return KeyPlaces.of(self._store.data, row_M, slots, self._length)

    def finish(self) -> None:
        """After the pass: fill the rows that are still to be filled."""
        if self._copies is not None:
            to, source = self._copies
            data = self._store.data[:, :, :, :, : _whole(self._length)]
            data[:, :, to] = data[:, :, source]


class ExtendView:
    """`PlacedKVCache` of a prefill that goes on where keys and values are stored already.

    Context i lies in row `rows[i]`; `starts[i]` slots of it are filled, and `counts[i]` of the W
    new tokens follow. The others are padding: they are not stored, and nothing looks at them.
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
        """Row and slot of each token that is stored."""
        source_M, offset_M = self._new_UW.nonzero().unbind(1)
        return self._rows[source_M], self._starts[source_M] + offset_M

    def extend(self, layer: int, k_BTHK: Tensor, v_BTHK: Tensor) -> Context:
        block = self._store.data[layer]
        fresh = torch.stack([k_BTHK[self._new_UW], v_BTHK[self._new_UW]], dim=1)
        row_M, slot_M = self._targets
        block.permute(1, 3, 0, 2, 4)[row_M, slot_M] = fresh
        keys, values = block[:, self._rows, :, : self.num_keys].flatten(1, 2)
        return as_context(keys, values)

    def places(self) -> KeyPlaces:
        # Padding looks at the first slot, and is not stored.
        slots_UW = (self._starts[:, None] + self._columns).where(self._new_UW, 0)
        rows_UW = self._rows[:, None].expand_as(slots_UW)
        found = KeyPlaces.of(self._store.data, rows_UW.flatten(), slots_UW.flatten(), self._longest)
        return replace(found, own_M=found.own_M.where(self._new_UW.flatten(), -1))


class DecodeView:
    """`PlacedKVCache` of one decode step: rows 0 .. N-1, new tokens in `slots_NW`.

    `length` is the longest context, all new tokens included, and `shortest` the shortest one up to
    its first new token. With `paths_NWP` (`kernels.tree_paths`) tokens stand in draft trees.
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
        # Views of all layers at once: one by one they would cost as much as the small operations.
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
        """Flat index of (key or value, row, head, slot) into one layer seen as (2*N*H*S, K), in the
        order of new keys: row, token, head."""
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

    def places(self) -> KeyPlaces:
        rows_M = _repeated_rows(*self._slots_NW.shape)
        return KeyPlaces.of(self._store.data, rows_M, self._slots_NW.flatten(), self._length)


def row_places(
    store: KVStore,
    rows_M: Tensor,
    slots_M: Tensor,
    positions_M: Tensor,
    paths: Tensor | None,
    longest: int,
) -> KeyPlaces:
    """Of a decode step row by row: new tokens of `rows_M` in `slots_M`, at `positions_M`, which see
    what `paths` says (`kernels.tree_paths`); `longest` is the longest context with all of them."""
    found = KeyPlaces.of(store.data, rows_M, slots_M, longest)
    return replace(found, seen_M=positions_M + 1, paths=paths)


@lru_cache(maxsize=256)
@torch.inference_mode(False)
def _repeated_rows(rows: int, times: int) -> Tensor:
    """0 .. rows - 1, each so many times one after another: the same few of them step by step."""
    return torch.arange(rows).repeat_interleave(times)
