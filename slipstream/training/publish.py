"""Weights on their way out: named buckets that keep their values while training goes on.

A snapshot copies nothing until a bucket is asked for, or until the optimizer is about to change the
weights (copy on write). So a receiver that is quick costs one bucket of memory, and one that is
slow still gets the version that it was promised. Used by backends; knows nothing about engines.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

from torch import Tensor

from slipstream.types import WeightBucket

BUCKET_BYTES = 64 * 2**20
"""Size at which a bucket is full: large enough for throughput, small next to any model."""


class WeightSnapshot:
    """An iterable of buckets `(name, detached copy)`, to be consumed once."""

    def __init__(
        self, named: Iterable[tuple[str, Tensor]], *, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self._lock = threading.Lock()
        self._buckets = [list(bucket) for bucket in _split(named, bucket_bytes)]
        self._next = 0
        self._frozen = False

    def freeze(self) -> None:
        """Copy what has not been taken yet; called before the weights change."""
        with self._lock:
            if not self._frozen:
                self._buckets = [_copy(bucket) for bucket in self._buckets]
                self._frozen = True

    def __iter__(self) -> Iterator[WeightBucket]:
        while (bucket := self._take()) is not None:
            yield bucket

    def _take(self) -> WeightBucket | None:
        with self._lock:
            if self._next == len(self._buckets):
                return None
            bucket, self._buckets[self._next] = self._buckets[self._next], []
            self._next += 1
            return bucket if self._frozen else _copy(bucket)


def _copy(bucket: WeightBucket) -> list[tuple[str, Tensor]]:
    return [(name, tensor.detach().clone()) for name, tensor in bucket]


def _split(
    named: Iterable[tuple[str, Tensor]], bucket_bytes: int
) -> Iterator[list[tuple[str, Tensor]]]:
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in named:
        if bucket and size + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket
