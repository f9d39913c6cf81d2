"""verl's module `verl.protocol`: `DataProto` and functions of batches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from slipstream.compat.verl.utils.py_functional import union_two_dict
from slipstream.rewards.data_proto import (
    DataProto,
    DataProtoConfig,
    DataProtoItem,
    dict_of_lists,
)

__all__ = [
    "DataProto",
    "DataProtoConfig",
    "DataProtoItem",
    "collate_fn",
    "fold_batch_dim",
    "list_of_dict_to_dict_of_list",
    "pad_dataproto_to_divisor",
    "unfold_batch_dim",
    "union_numpy_dict",
    "union_tensor_dict",
    "unpad_dataproto",
]

_log = logging.getLogger(__name__)

list_of_dict_to_dict_of_list = dict_of_lists


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Return the batch with a number of rows that `size_divisor` divides, and how many were added.

    The added rows are the first rows again, in order, as often as needed. A batch without rows is
    returned unchanged, with a warning. Raises ValueError if `size_divisor` is below 1.
    """
    if size_divisor < 1:
        raise ValueError(f"size_divisor must be at least 1, got {size_divisor}")
    if not len(data):
        _log.warning("a DataProto without rows was not padded")
        return data, 0
    missing = -len(data) % size_divisor
    if not missing:
        return data, 0
    return data.select_idxs(np.arange(len(data) + missing) % len(data)), missing


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Return the batch without its last `pad_size` rows."""
    return data.slice(0, len(data) - pad_size) if pad_size else data


def union_tensor_dict(
    tensor_dict1: dict[str, torch.Tensor], tensor_dict2: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Add the tensors of the second mapping to the first and return it.

    Raises ValueError if a shared name has different values, or the numbers of rows differ.
    """
    return _united(tensor_dict1, tensor_dict2)


def union_numpy_dict(
    tensor_dict1: dict[str, np.ndarray[Any, Any]], tensor_dict2: Mapping[str, np.ndarray[Any, Any]]
) -> dict[str, np.ndarray[Any, Any]]:
    """Add the arrays of the second mapping to the first and return it. NaN equals NaN.

    Raises ValueError if a shared name has different values, or the numbers of rows differ.
    """
    return _united(tensor_dict1, tensor_dict2)


def _united(one: dict[str, Any], two: Mapping[str, Any]) -> dict[str, Any]:
    lengths = {len(column) for column in [*one.values(), *two.values()]}
    if len(lengths) > 1:
        raise ValueError(f"columns with different numbers of rows: {sorted(lengths)}")
    return union_two_dict(one, two)


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """Return a batch of `new_batch_size` rows, each of which has B / `new_batch_size` old rows.

    Fields (B, ...) become (`new_batch_size`, B / `new_batch_size`, ...). Raises ValueError if
    `new_batch_size` does not divide B.
    """
    if new_batch_size < 1 or len(data) % new_batch_size:
        raise ValueError(f"{len(data)} rows cannot be folded into {new_batch_size} equal rows")
    shape = (new_batch_size, len(data) // new_batch_size)
    return _reshaped(data, lambda column: (*shape, *column.shape[1:]))


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Return a batch whose rows are the entries of the first `batch_dims` dimensions.

    The inverse of `fold_batch_dim`. Raises ValueError if fields differ in these dimensions.
    """
    return _reshaped(data, lambda column: (-1, *column.shape[batch_dims:]))


def _reshaped(data: DataProto, shape: Callable[[Any], tuple[int, ...]]) -> DataProto:
    return type(data)(
        {key: column.reshape(shape(column)) for key, column in data.batch.items()},
        {key: column.reshape(shape(column)) for key, column in data.non_tensor_batch.items()},
        data.meta_info,
    )


def collate_fn(x: Sequence[DataProtoItem]) -> DataProto:
    """Return rows as a batch without `meta_info`. Raises ValueError if their fields differ."""
    tensors = dict_of_lists([dict(item.batch) for item in x])
    others = dict_of_lists([item.non_tensor_batch for item in x])
    return DataProto({key: torch.stack(rows) for key, rows in tensors.items()}, others)
