"""Random draws that depend on a key and a counter, not on a shared random number stream.

The numbers are hashes, so they are the same on every machine and Python version, and draws of one
caller never shift those of another. Used for problems, demonstrations and shuffles. The noise of
token sampling is in `slipstream.sampling`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class KeyedDraws:
    """An endless sequence of random numbers that is determined by `key`.

    The parts of the key are joined by a separator that does not occur in integers, so
    `("a", 1, 12)` and `("a", 11, 2)` are different keys.
    """

    __slots__ = ("_counter", "_key")

    def __init__(self, *key: str | int) -> None:
        joined = "\x1f".join(str(part) for part in key)
        self._key = hashlib.blake2b(joined.encode(), digest_size=32).digest()
        self._counter = 0

    def bits64(self) -> int:
        """Return a uniform integer in [0, 2**64)."""
        counter = self._counter.to_bytes(8, "little")
        self._counter += 1
        return int.from_bytes(
            hashlib.blake2b(counter, key=self._key, digest_size=8).digest(), "little"
        )

    def below(self, n: int) -> int:
        """Return a uniform integer in [0, n). Its bias is below n / 2**64."""
        return (self.bits64() * n) >> 64

    def unit(self) -> float:
        """Return a uniform float in [0, 1) with 53 random bits."""
        return (self.bits64() >> 11) * 2.0**-53

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """Return a uniformly shuffled copy (Fisher and Yates)."""
        out = list(items)
        for last in range(len(out) - 1, 0, -1):
            other = self.below(last + 1)
            out[last], out[other] = out[other], out[last]
        return out
