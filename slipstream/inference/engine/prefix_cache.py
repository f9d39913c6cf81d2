"""Keys and values of ended requests, kept for contexts that begin as theirs did.

The next turn of a conversation repeats the one before; its prefill need only go on. What is kept
was computed under the present weights: an update drops it all. In exact mode a token's keys and
values have the same bits from a prefill, a decode step or a verified draft, so any number of tokens
may be taken over. Least recently used goes first. The idea is that of SGLang's radix cache (Zheng
et al. 2024); as rows are contiguous here, a head that is found is copied, not shared.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.inference.engine.kv_cache import KVPrefix

BLOCK = 16
"""Tokens by which contexts are indexed: agreement in fewer is not looked for."""


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    tokens: array[int]
    kv: KVPrefix
    """(L, 2, H, len(tokens), K)."""
    keys: list[int]
    """Of its blocks, each hashed with those before it."""


class PrefixCache:
    """Heads of contexts by their tokens."""

    def __init__(self) -> None:
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._index: dict[int, list[_Entry]] = {}
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, context: Sequence[int]) -> KVPrefix | None:
        """Keys and values of the longest known head; None where there is none.

        At least one token of `context` is left: its hidden state has to be computed.
        """
        tokens = array("q", context)
        for key in reversed(_keys(tokens)):
            found = self._index.get(key)
            if found:
                entry = max(found, key=lambda e: _agreement(e.tokens, tokens))
                count = min(_agreement(entry.tokens, tokens), len(tokens) - 1)
                if count >= BLOCK:
                    self._entries.move_to_end(id(entry))
                    return entry.kv.first(count)
        return None

    def add(self, context: Sequence[int], kv: KVPrefix) -> None:
        """Keep `kv`, those of all tokens of `context`."""
        tokens = array("q", context)
        keys = _keys(tokens)
        if not keys:
            return
        for key in keys:
            for entry in list(self._index.get(key, ())):
                # Whatever it could be asked for, the longer one answers, too.
                if entry.keys[-1] == key and entry.tokens == tokens[: len(entry.tokens)]:
                    self._drop(entry)
        entry = _Entry(tokens, kv, keys)
        self._entries[id(entry)] = entry
        for key in keys:
            self._index.setdefault(key, []).append(entry)
        self.nbytes += kv.nbytes

    def shrink(self, nbytes: int) -> None:
        """Drop the least recently used until at most `nbytes` are taken."""
        while self.nbytes > nbytes:
            self._drop(next(iter(self._entries.values())))

    def clear(self) -> None:
        """Drop everything."""
        self.shrink(0)

    def _drop(self, entry: _Entry) -> None:
        del self._entries[id(entry)]
        self.nbytes -= entry.kv.nbytes
        for key in entry.keys:
            self._index[key].remove(entry)
            if not self._index[key]:
                del self._index[key]


def _keys(tokens: array[int]) -> list[int]:
    keys, key = [], 0
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        key = hash((key, tokens[end - BLOCK : end].tobytes()))
        keys.append(key)
    return keys


def _agreement(left: array[int], right: array[int]) -> int:
    """How many tokens agree from the first on."""
    most = min(len(left), len(right))
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
