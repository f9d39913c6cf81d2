"""The columns of a `DataProto`: named tensors, and comparison of columns of any type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch


class TensorColumns(dict[str, Any]):
    """Named tensors with the same number of rows, which is the batch's length.

    Non-tensor fields can be looked up here too. Code older than verl's split of the two expects
    fields of its own data set (`batch["state"]`) next to `batch["responses"]`. An index that is not
    text selects rows, as in a TensorDict.
    """

    def __init__(
        self, tensors: Mapping[str, Any], others: Mapping[str, Any], size: int | None
    ) -> None:
        """`size` is the number of rows; None for a single row, whose fields have any shape."""
        super().__init__(tensors)
        self._others, self._size = others, size

    def __len__(self) -> int:
        return 1 if self._size is None else self._size

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorColumns, (dict(self), self._others, self._size)

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or key in self._others

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return super().__getitem__(key)
        if self._size is None:
            raise IndexError(f"a single row is indexed by a field's name, got {key!r}")
        if isinstance(key, int | np.integer):
            return TensorColumns({name: value[key] for name, value in self.items()}, {}, None)
        places = row_places(key, self._size)
        rows = {name: picked(value, key, places) for name, value in self.items()}
        return TensorColumns(rows, {}, len(places))

    def __setitem__(self, key: str, value: Any) -> None:
        # `len(self)` is the number of rows, not that of the tensors.
        if super().__len__() == 0 and self._size == 0 and not self._others:
            self._size = len(value)
        if self._size is not None and len(value) != self._size:
            raise ValueError(f"{key!r} has {len(value)} rows, but the batch has {self._size}")
        super().__setitem__(key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Add the tensors of a mapping. Raises ValueError as an assignment does."""
        # `dict.update` would not call `__setitem__`.
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Return the field, which becomes `default` if it is missing."""
        if key not in self:
            self[key] = default
        return self[key]

    def get(self, key: str, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def __missing__(self, key: str) -> Any:
        if key in self._others:
            return self._others[key]
        raise KeyError(f"{key!r} is not a field of the batch (fields: {self._known()})")

    def tensor(self, key: str) -> torch.Tensor:
        """Return a tensor. Raises KeyError if the field is missing or not a tensor."""
        if not super().__contains__(key):
            raise KeyError(f"{key!r} is not a tensor of the batch (fields: {self._known()})")
        found: torch.Tensor = super().__getitem__(key)
        return found

    @property
    def batch_size(self) -> torch.Size:
        return torch.Size([] if self._size is None else [self._size])

    @property
    def device(self) -> torch.device | None:
        """The device of the tensors; None without tensors, or if they are on several devices."""
        devices = {value.device for value in self.values()}
        return devices.pop() if len(devices) == 1 else None

    def _known(self) -> str:
        return ", ".join([*self, *self._others])


def row_places(place: Any, size: int) -> np.ndarray[Any, Any]:
    """Return the positions that a slice, a list, array or tensor of positions, or a mask selects.

    `size` is the number of rows. Raises IndexError for a position or a mask that does not fit.
    """
    if isinstance(place, slice):
        return np.arange(size)[place]
    given = np.asarray(plain(place))
    if given.ndim != 1:
        raise TypeError(f"rows are selected by a list or a 1-D array, got the shape {given.shape}")
    if given.dtype == bool and len(given) != size:
        raise IndexError(f"a mask of {len(given)} entries for a batch of {size} rows")
    places: np.ndarray[Any, Any] = np.arange(size)[given if given.size else given.astype(int)]
    return places


def picked(tensor: torch.Tensor, place: Any, places: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return the rows of a tensor that `place` selects: a view for a slice, else a copy.

    `places` is `row_places` of `place`.
    """
    if isinstance(place, slice) and (place.step is None or place.step > 0):
        return tensor[place]
    return tensor[torch.from_numpy(places.copy()).to(tensor.device)]


def plain(place: Any) -> Any:
    """Convert an index tensor to NumPy; other indices are unchanged."""
    return place.cpu().numpy() if isinstance(place, torch.Tensor) else place


def same(left: Any, right: Any) -> bool:
    """Return whether two fields, or two of their values, are equal. NaN equals NaN."""
    if left is right:
        return True
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        both = isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)
        return both and bool(torch.equal(left, right))
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        if not (isinstance(left, np.ndarray) and isinstance(right, np.ndarray)):
            return False
        if left.shape != right.shape:
            return False
        return all(same(a, b) for a, b in zip(left.flat, right.flat, strict=True))
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple) and type(left) is type(right):
        pairs = zip(left, right, strict=False)
        return len(left) == len(right) and all(same(a, b) for a, b in pairs)
    if isinstance(left, float | np.floating) and left != left:
        return bool(isinstance(right, float | np.floating) and right != right)
    return bool(left == right)


def check_agree(one: Mapping[Any, Any], two: Mapping[Any, Any], both: str) -> None:
    """Raise ValueError if two mappings have different values of a shared key.

    `both` is the start of the message, such as "both batches have a field".
    """
    for key, value in two.items():
        if key in one and not same(one[key], value):
            raise ValueError(f"{both} {key!r}, but its values differ")


def alike(values: Sequence[Any]) -> bool:
    """Return whether all values are tensors of one shape, so that they can be stacked."""
    return all(isinstance(v, torch.Tensor) for v in values) and len({v.shape for v in values}) == 1


def objects(values: Any) -> np.ndarray[Any, Any]:
    """Return an array unchanged, and other values as a 1-D object array with one entry per row."""
    if isinstance(values, np.ndarray):
        return values
    array = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        array[i] = value
    return array
