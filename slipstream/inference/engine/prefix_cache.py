"""A prefix cache: keys and values of ended requests, for contexts with the same prefix.

Each turn of a conversation repeats the turns before it, so its prefill only has to compute the new
tokens. A weight update clears the cache. In exact mode the keys and values of a token have the same
bits from a prefill, a decode step or a verified draft, so a prefix of any length can be reused. The
least recently used entries are dropped first. The idea is that of SGLang's radix cache (Zheng et
al. 2024). Here a prefix is copied, not shared.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.inference.engine.kv_rows import KVPrefix

BLOCK = 16
"""Contexts are indexed by blocks of this many tokens. Shorter common prefixes are not found."""


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """One cached context."""

    tokens: array[int]
    kv: KVPrefix
    """Keys and values of all `tokens`."""
    keys: list[int]
    """One hash per block, of the tokens up to the end of the block."""


class PrefixCache:
    """Keys and values of contexts, found by the tokens of a prefix. `nbytes` is their size."""

    def __init__(self) -> None:
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._index: dict[int, list[_Entry]] = {}
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, context: Sequence[int]) -> KVPrefix | None:
        """Keys and values of the longest cached prefix of `context`; None if there is none.

        The prefix excludes the last token of `context`, whose hidden state must be computed.
        """
        tokens = array("q", context)
        for key in reversed(_block_hashes(tokens)):
            entries = self._index.get(key)
            if entries:
                entry = max(entries, key=lambda e: _common_length(e.tokens, tokens))
                count = min(_common_length(entry.tokens, tokens), len(tokens) - 1)
                if count >= BLOCK:
                    self._entries.move_to_end(id(entry))
                    return entry.kv.first(count)
        return None

    def add(self, context: Sequence[int], kv: KVPrefix) -> None:
        """Add `kv`, the keys and values of all tokens of `context`."""
        tokens = array("q", context)
        keys = _block_hashes(tokens)
        if not keys:
            return
        for key in keys:
            for entry in list(self._index.get(key, ())):
                # The new entry contains this one.
                if entry.keys[-1] == key and entry.tokens == tokens[: len(entry.tokens)]:
                    self._drop(entry)
        entry = _Entry(tokens, kv, keys)
        self._entries[id(entry)] = entry
        for key in keys:
            self._index.setdefault(key, []).append(entry)
        self.nbytes += kv.nbytes

    def shrink(self, nbytes: int) -> None:
        """Drop the least recently used entries until the cache has at most `nbytes` bytes."""
        while self.nbytes > nbytes:
            self._drop(next(iter(self._entries.values())))

    def clear(self) -> None:
        """Drop all entries."""
        self.shrink(0)

    def _drop(self, entry: _Entry) -> None:
        del self._entries[id(entry)]
        self.nbytes -= entry.kv.nbytes
        for key in entry.keys:
            self._index[key].remove(entry)
            if not self._index[key]:
                del self._index[key]


def _block_hashes(tokens: array[int]) -> list[int]:
    keys, key = [], 0
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        key = hash((key, tokens[end - BLOCK : end].tobytes()))
        keys.append(key)
    return keys


def _common_length(left: array[int], right: array[int]) -> int:
    """The length of the longest common prefix."""
    most = min(len(left), len(right))
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
