"""Weights on their way out: named buckets that keep their values while training goes on.

A snapshot copies nothing until a bucket is asked for, or until the optimizer is about to change the
weights (copy on write). So a receiver that is quick costs one bucket of memory, and one that is
slow still gets the version that it was promised. Used by backends; knows nothing about engines.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from slipstream.models.lora import LoraLinear, value_of
from slipstream.types import WeightBucket

_Named = tuple[str, Tensor | LoraLinear]

BUCKET_BYTES = 64 * 2**20
"""Size at which a bucket is full: large enough for throughput, small next to any model."""


class WeightSnapshot:
    """An iterable of buckets `(name, detached copy)`, to be consumed once.

    Of a layer with an adapter the merged weight is sent, computed when it is asked for.
    """

    def __init__(self, named: Iterable[_Named], *, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._lock = threading.Lock()
        self._waiting = [list(bucket) for bucket in _split(named, bucket_bytes)]
        self._copies: list[WeightBucket] | None = None
        self._next = 0

    def freeze(self) -> None:
        """Copy what has not been taken yet; called before the weights change."""
        with self._lock:
            if self._copies is None:
                self._copies = [_copy(bucket) for bucket in self._waiting]
                self._waiting = [[] for _ in self._waiting]

    def __iter__(self) -> Iterator[WeightBucket]:
        while (bucket := self._take()) is not None:
            yield bucket

    def _take(self) -> WeightBucket | None:
        with self._lock:
            place = self._next
            if place == len(self._waiting):
                return None
            self._next += 1
            if self._copies is not None:
                bucket, self._copies[place] = self._copies[place], []
                return bucket
            waiting, self._waiting[place] = self._waiting[place], []
            return _copy(waiting)


def named_buckets(named: Iterable[_Named]) -> Iterator[WeightBucket]:
    """Buckets of the values as they are when each is asked for."""
    for bucket in _split(named, BUCKET_BYTES):
        # An engine asks in inference mode, in which slices cannot be gathered.
        with torch.inference_mode(False):
            copies = _copy(bucket)
        yield copies


def _copy(bucket: list[_Named]) -> WeightBucket:
    return [(name, _own(w)) for name, w in bucket]


def _own(weight: Tensor | LoraLinear) -> Tensor:
    """Values that nothing changes: merged and gathered ones are new already."""
    value = value_of(weight)
    fresh = isinstance(weight, LoraLinear) or value.data_ptr() != weight.data_ptr()
    return value if fresh else value.clone()


def _split(named: Iterable[_Named], bucket_bytes: int) -> Iterator[list[_Named]]:
    bucket: list[_Named] = []
    size = 0
    for name, weight in named:
        nbytes = weight.base_weight.nbytes if isinstance(weight, LoraLinear) else weight.nbytes
        if bucket and size + nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, weight))
        size += nbytes
    if bucket:
        yield bucket
