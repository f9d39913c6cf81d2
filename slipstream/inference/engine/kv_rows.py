"""What the engine needs of the memory for keys and values: rows of running requests.

`KVStore` (`kv_cache`) has one rectangle of memory, for torch's operations and CUDA graphs.
`BlockStore` (`kv_blocks`) has blocks, for the compiled kernels.

Slot s of a row holds position s of a request's context. When a request ends, the last row takes its
place, so the rows of a batch are 0 to n-1.

Shapes: L layers, H key-value heads, S slots, K head width, N requests, W new tokens per request,
M tokens, P longest path of a draft tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from slipstream.models.attention import KVCache
from slipstream.models.cpu_attention import SLOT_BLOCK, KeyPlaces
from slipstream.models.numerics import round_up

Cache = KVCache | KeyPlaces
"""The argument `kv_cache` of a forward pass."""


def block_aligned(length: int) -> int:
    """Return `length` rounded up to whole blocks of `SLOT_BLOCK` slots."""
    return round_up(length, SLOT_BLOCK)


@dataclass(frozen=True, slots=True)
class KVPrefix:
    """Keys and values of the first `length` tokens of a context."""

    parts: tuple[Tensor, ...]
    """(L, 2, H, S, K) each, one after the other, in whole blocks of `SLOT_BLOCK` slots. Slots from
    `length` on are not used."""
    length: int

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def first(self, length: int) -> KVPrefix:
        """The keys and values of the first `length` tokens, as views."""
        parts, left = list[Tensor](), block_aligned(length)
        for part in self.parts:
            if left:
                parts.append(part[:, :, :, :left])
                left -= parts[-1].shape[3]
        return KVPrefix(tuple(parts), length)

    def clone(self) -> KVPrefix:
        """A copy in new memory."""
        return KVPrefix(tuple(part.clone() for part in self.parts), self.length)


class KVRows(Protocol):
    """The keys and values of the running requests, within a budget in bytes."""

    @property
    def budget(self) -> int:
        """The most bytes to allocate."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        ...

    @property
    def slot_bytes(self) -> int:
        """Bytes of the keys and values of one token."""
        ...

    def size(self, lengths: Sequence[int]) -> int:
        """Return the bytes that contexts of these lengths need in an empty store."""
        ...

    def fits(self, lengths: Sequence[int]) -> bool:
        """Return whether the budget holds contexts of these lengths in rows 0, 1, and so on."""
        ...

    def reserve(self, lengths: Sequence[int]) -> None:
        """Make room for contexts of these lengths in rows 0, 1, and so on.

        The contents of these rows are kept. The caller must have checked `fits`.
        """
        ...

    def end(self, row: int, last: int, length: int) -> None:
        """Free `row`. The first `length` slots of row `last` move to it if it is another row."""
        ...

    def share(self, source: int, target: int, length: int) -> None:
        """Give row `target` the keys and values of the first `length` slots of row `source`."""
        ...

    def move_slots(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Copy keys and values within rows, in the given order.

        Each move is (row, source slot, target slot). No move may read a slot that an earlier move
        has written.
        """
        ...

    def prefix_size(self, length: int) -> int:
        """Return the bytes of a copy of the first `length` tokens of a row."""
        ...

    def view_prefix(self, row: int, length: int) -> KVPrefix:
        """Return the first `length` tokens of a row, as views."""
        ...

    def restore(self, row: int, prefix: KVPrefix) -> None:
        """Copy keys and values to the beginning of a row."""
        ...

    def clear(self, row: int) -> None:
        """Zero a row that may hold NaN once it is freed, because 0 * NaN is NaN."""
        ...

    def release(self) -> None:
        """Free the memory and all rows. The contents are lost."""
        ...

    def prefill(
        self, rows: Sequence[int], sources: Sequence[int], lengths: Sequence[int], width: int
    ) -> tuple[Cache, Callable[[], None]]:
        """Return the cache of a prefill of whole contexts, and a function to call after it.

        Row `rows[i]` gets the context number `sources[i]`. Every context has at least one row.
        Context j has `lengths[j]` tokens, padded to `width` on the right.
        """
        ...

    def extend(
        self, rows: Sequence[int], starts: Sequence[int], counts: Sequence[int], width: int
    ) -> Cache:
        """Return the cache of a prefill that continues contexts whose first tokens are cached.

        Context i is in row `rows[i]`. Its first `starts[i]` slots are filled, and `counts[i]` of
        the `width` new tokens follow. The other new tokens are padding: they are not stored, and no
        token attends to them.
        """
        ...

    def decode(
        self, slots_NW: Tensor, longest: int, shortest: int, paths_NWP: Tensor | None
    ) -> Cache:
        """Return the cache of a decode step: rows 0 to N-1, with their new tokens in `slots_NW`.

        `longest` is the length of the longest context including all new tokens. `shortest` is the
        length of the shortest context up to and including its first new token. `paths_NWP` are the
        paths of draft trees, as `kernels.tree_paths` defines them; None without trees.
        """
        ...
