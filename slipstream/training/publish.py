"""Snapshots of weights for publishing: named buckets that keep their values during training.

Copies are made on write: a bucket is copied when it is taken, or before the optimizer changes the
weights. So a fast receiver needs memory for one bucket only, and a slow receiver still gets the
published version. Backends use this module. It knows nothing about engines.
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
"""Size of a full bucket in bytes: large enough for throughput, small compared with models."""


class WeightSnapshot:
    """An iterable of buckets of `(name, detached copy)` that can be consumed once.

    For a layer with a LoRA adapter the merged weight is computed when its bucket is taken.
    """

    def __init__(self, named: Iterable[_Named], *, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._lock = threading.Lock()
        self._uncopied = [list(bucket) for bucket in _split(named, bucket_bytes)]
        self._copies: list[WeightBucket] | None = None
        self._next = 0

    def freeze(self) -> None:
        """Copy the buckets that have not been taken. Must be called before the weights change."""
        with self._lock:
            if self._copies is None:
                self._copies = [_copy(bucket) for bucket in self._uncopied]
                self._uncopied = [[] for _ in self._uncopied]

    def __iter__(self) -> Iterator[WeightBucket]:
        while (bucket := self._take()) is not None:
            yield bucket

    def _take(self) -> WeightBucket | None:
        with self._lock:
            index = self._next
            if index == len(self._uncopied):
                return None
            self._next += 1
            if self._copies is not None:
                bucket, self._copies[index] = self._copies[index], []
                return bucket
            uncopied, self._uncopied[index] = self._uncopied[index], []
            return _copy(uncopied)


def named_buckets(named: Iterable[_Named]) -> Iterator[WeightBucket]:
    """Yield buckets of copies; each bucket is copied when it is requested."""
    for bucket in _split(named, BUCKET_BYTES):
        # Engines iterate in inference mode, where sharded tensors cannot be gathered.
        with torch.inference_mode(False):
            copies = _copy(bucket)
        yield copies


def _copy(bucket: list[_Named]) -> WeightBucket:
    return [(name, _own(w)) for name, w in bucket]


def _own(weight: Tensor | LoraLinear) -> Tensor:
    """A copy of the weight's value. Merged and gathered values are already new tensors."""
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
