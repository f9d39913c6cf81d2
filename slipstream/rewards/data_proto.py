"""verl's `DataProto`: the part of it that reward functions and batch managers use.

Tensors are in `batch`, all other values in `non_tensor_batch`. Such batches are built only for user
code that was written for verl (`signatures`, samplers and data sets with callbacks), and for
learned reward models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from slipstream.types import Sample


class TensorColumns(dict[str, Any]):
    """Named tensors with the same number of rows, which is the batch's length.

    Non-tensor fields can be looked up here too. Code older than verl's split of the two expects
    fields of its own data set (`batch["state"]`) next to `batch["responses"]`.
    """

    def __init__(self, tensors: Mapping[str, Any], others: Mapping[str, Any], size: int) -> None:
        super().__init__(tensors)
        self._others, self._size = others, size

    def __len__(self) -> int:
        return self._size

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorColumns, (dict(self), self._others, self._size)

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or key in self._others

    def __setitem__(self, key: str, value: Any) -> None:
        if len(self) == 0 and self._size == 0 and not self._others:
            self._size = len(value)
        if len(value) != self._size:
            raise ValueError(f"{key!r} has {len(value)} rows, but the batch has {self._size}")
        super().__setitem__(key, value)

    def get(self, key: str, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def __missing__(self, key: str) -> Any:
        if key in self._others:
            return self._others[key]
        known = ", ".join([*self, *self._others])
        raise KeyError(f"{key!r} is not a field of the batch (fields: {known})")

    @property
    def batch_size(self) -> torch.Size:
        return torch.Size([self._size])


class DataProto:
    """Rows of tensors and of other values.

    `data[i]` is one row, without the first dimension. `data[i:j]`, and indexing with a list of
    positions, return batches.
    """

    def __init__(
        self,
        batch: Mapping[str, torch.Tensor] | None = None,
        non_tensor_batch: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> None:
        """Raises ValueError if the fields differ in length."""
        tensors = dict(batch or {})
        self.non_tensor_batch = {k: _objects(v) for k, v in (non_tensor_batch or {}).items()}
        lengths = {k: len(v) for k, v in tensors.items()}
        lengths |= {k: len(v) for k, v in self.non_tensor_batch.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the fields of a batch differ in length: {lengths}")
        self.batch = TensorColumns(tensors, self.non_tensor_batch, next(iter(lengths.values()), 0))
        self.meta_info = dict(meta_info or {})

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None
    ) -> DataProto:
        """Build a batch from one mapping of tensors and other values, as `collate_fn` returns."""
        tensors = {k: v for k, v in data.items() if isinstance(v, torch.Tensor)}
        others = {k: v for k, v in data.items() if k not in tensors}
        return cls(tensors, others, meta_info)

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> DataProto:
        """Build a batch like the constructor, under verl's name and keywords."""
        return cls(tensors, non_tensors, meta_info)

    @classmethod
    def concat(cls, parts: Sequence[DataProto]) -> DataProto:
        """Concatenate the rows of all parts; `meta_info` is that of the first one.

        Raises ValueError if there is no part or the fields differ.
        """
        if not parts:
            raise ValueError("no batch to concatenate")
        first = parts[0]
        for part in parts[1:]:
            first._check_fields(part)
        return cls(
            {k: torch.cat([p.batch[k] for p in parts]) for k in first.batch},
            {
                k: np.concatenate([p.non_tensor_batch[k] for p in parts])
                for k in first.non_tensor_batch
            },
            first.meta_info,
        )

    @property
    def responses(self) -> list[str]:
        """The decoded responses."""
        return list(self.non_tensor_batch["response_text"])

    @property
    def ground_truth_answers(self) -> list[Any]:
        """The `ground_truth` of each row's `reward_model`."""
        rows = self.non_tensor_batch["reward_model"]
        return [None if row is None else row.get("ground_truth") for row in rows]

    def union(self, other: DataProto) -> DataProto:
        """Add the fields of `other` to this batch and return it.

        Raises ValueError if the lengths differ, or a shared field has different values.
        """
        for mine, theirs in (
            (self.batch, other.batch),
            (self.non_tensor_batch, other.non_tensor_batch),
        ):
            for key, value in theirs.items():
                if key in mine and not _same(mine[key], value):
                    raise ValueError(f"both batches have a field {key!r}, but its values differ")
        merged = DataProto(
            {**self.batch, **other.batch},
            {**self.non_tensor_batch, **other.non_tensor_batch},
            {**self.meta_info, **other.meta_info},
        )
        self.batch, self.non_tensor_batch = merged.batch, merged.non_tensor_batch
        self.meta_info = merged.meta_info
        return self

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> DataProto:
        """Return a batch of some fields (None: all). Raises KeyError if a field is missing."""
        tensors = self.batch if batch_keys is None else {k: self.batch[k] for k in batch_keys}
        others: Mapping[str, Any] = self.non_tensor_batch
        if non_tensor_batch_keys is not None:
            others = {k: others[k] for k in non_tensor_batch_keys}
        meta = self.meta_info
        if meta_info_keys is not None:
            meta = {k: meta[k] for k in meta_info_keys}
        return DataProto(tensors, others, meta)

    def pop(
        self,
        batch_keys: Sequence[str] = (),
        non_tensor_batch_keys: Sequence[str] = (),
        meta_info_keys: Sequence[str] = (),
    ) -> DataProto:
        """Remove fields and return them as a batch. Raises KeyError if one is missing."""
        popped = self.select(batch_keys, non_tensor_batch_keys, meta_info_keys)
        for key in batch_keys:
            del self.batch[key]
        for key in non_tensor_batch_keys:
            del self.non_tensor_batch[key]
        for key in meta_info_keys:
            del self.meta_info[key]
        return popped

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> DataProto:
        """Rename tensors in place and return the batch. Raises KeyError if one is missing."""
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys)
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys)
        if len(old) != len(new):
            raise ValueError(f"{len(old)} fields cannot be renamed to {len(new)} names")
        tensors = {key: dict.pop(self.batch, key) for key in old}
        for name, key in zip(new, old, strict=True):
            self.batch[name] = tensors[key]
        return self

    def select_idxs(self, idxs: Any) -> DataProto:
        """Return the rows at these positions, or at which a mask is true."""
        chosen: DataProto = self[idxs]
        return chosen

    def slice(self, start: int | None = None, end: int | None = None) -> DataProto:
        """Return the rows from `start` up to, but not including, `end`."""
        rows: DataProto = self[start:end]
        return rows

    def reorder(self, indices: Any) -> None:
        """Reorder the rows in place."""
        ordered = self[indices]
        self.batch, self.non_tensor_batch = ordered.batch, ordered.non_tensor_batch

    def split(self, split_size: int) -> list[DataProto]:
        """Split into batches of `split_size` rows; the last one may have fewer."""
        return [self[at : at + split_size] for at in range(0, len(self), split_size)]

    def chunk(self, chunks: int) -> list[DataProto]:
        """Split into `chunks` batches of equal size. Raises ValueError if that is impossible."""
        if chunks < 1 or len(self) % chunks:
            raise ValueError(f"{len(self)} rows cannot be divided into {chunks} equal parts")
        return self.split(len(self) // chunks)

    def make_iterator(
        self, mini_batch_size: int, epochs: int, seed: int | None = None
    ) -> Iterator[DataProto]:
        """Yield mini-batches for `epochs` passes, with a new random order in each pass.

        Raises ValueError if the number of rows is not a multiple of `mini_batch_size`.
        """
        if mini_batch_size < 1 or len(self) % mini_batch_size:
            raise ValueError(f"{len(self)} rows do not fill mini-batches of {mini_batch_size}")
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        for _ in range(epochs):
            order = torch.randperm(len(self), generator=generator)
            yield from self[order].split(mini_batch_size)

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Repeat each row (`interleave`), or the whole batch, `repeat_times` times."""
        rows = np.arange(len(self))
        order = np.repeat(rows, repeat_times) if interleave else np.tile(rows, repeat_times)
        repeated: DataProto = self[torch.from_numpy(order)]
        return repeated

    def to(self, device: Any) -> DataProto:
        """Move the tensors to `device` and return the batch."""
        for key, value in self.batch.items():
            self.batch[key] = value.to(device)
        return self

    def _check_fields(self, other: DataProto) -> None:
        for mine, theirs in (
            (self.batch, other.batch),
            (self.non_tensor_batch, other.non_tensor_batch),
        ):
            if mine.keys() != theirs.keys():
                differ = ", ".join(sorted(mine.keys() ^ theirs.keys()))
                raise ValueError(f"batches differ in their fields: {differ}")

    def __len__(self) -> int:
        return len(self.batch)

    def __getitem__(self, place: Any) -> Any:
        if not isinstance(place, int | np.integer):
            return DataProto(
                {k: v[place] for k, v in self.batch.items()},
                {k: v[_plain(place)] for k, v in self.non_tensor_batch.items()},
                self.meta_info,
            )
        at = int(place)
        if not -len(self) <= at < len(self):
            raise IndexError(f"row {at} of a batch of {len(self)}")
        return DataProtoItem(
            {k: v[at] for k, v in self.batch.items()},
            {k: v[at] for k, v in self.non_tensor_batch.items()},
            self.meta_info,
        )

    def __iter__(self) -> Iterator[DataProtoItem]:
        return (self[i] for i in range(len(self)))


class DataProtoItem:
    """One row of a `DataProto`: the value of each field."""

    def __init__(
        self,
        batch: Mapping[str, Any],
        non_tensor_batch: Mapping[str, Any],
        meta_info: Mapping[str, Any],
    ) -> None:
        self.non_tensor_batch = dict(non_tensor_batch)
        self.batch = TensorColumns(batch, self.non_tensor_batch, 1)
        self.meta_info = dict(meta_info)


def proto_of(samples: Sequence[Sample], responses: Sequence[str]) -> DataProto:
    """Return finished samples as the batch that verl passes to reward managers.

    B rows of P prompt tokens and R response tokens (the maximum lengths); padding is 0. Tensors:
    `prompts` (B, P), padded on the left; `responses` and `response_mask` (B, R), padded on the
    right; `input_ids`, `attention_mask` and `position_ids` (B, P + R). Other fields:
    `data_source`, `reward_model` (with `ground_truth`), `extra_info`, `uid`, `raw_prompt`, and
    `response_text`, which is `responses`, the decoded texts. Each entry of `extra_info` is also a
    field of its own; if all its values are tensors of one shape, it is a stacked tensor.
    """
    width = max((len(s.prompt_ids) for s in samples), default=0)
    length = max((s.response_length for s in samples), default=0)
    prompts = torch.zeros((len(samples), width), dtype=torch.long)
    answers = torch.zeros((len(samples), length), dtype=torch.long)
    attention = torch.zeros((len(samples), width + length), dtype=torch.long)
    mask = torch.zeros((len(samples), length), dtype=torch.long)
    for i, sample in enumerate(samples):
        prompt, answer = sample.prompt_ids, sample.response_ids
        prompts[i, width - len(prompt) :] = torch.tensor(prompt, dtype=torch.long)
        answers[i, : len(answer)] = torch.tensor(answer, dtype=torch.long)
        attention[i, width - len(prompt) : width + len(answer)] = 1
        loss_mask = sample.loss_mask[len(prompt) :]
        mask[i, : len(answer)] = torch.tensor(loss_mask).ne(0).long()
    fields: dict[str, list[Any]] = {
        "data_source": [s.data_source for s in samples],
        "reward_model": [{"ground_truth": s.ground_truth, "style": "rule"} for s in samples],
        "extra_info": [s.extra_info for s in samples],
        "uid": [s.uid for s in samples],
        "raw_prompt": [s.prompt for s in samples],
        "response_text": list(responses),
    }
    own = {key: None for s in samples for key in s.extra_info if key not in fields}
    columns: dict[str, list[Any]] = {key: [s.extra_info.get(key) for s in samples] for key in own}
    stacked = {key: torch.stack(list(values)) for key, values in columns.items() if _alike(values)}
    fields |= {key: values for key, values in columns.items() if key not in stacked}
    return DataProto(
        {
            **stacked,
            "prompts": prompts,
            "responses": answers,
            "input_ids": torch.cat([prompts, answers], dim=1),
            "attention_mask": attention,
            "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
            "response_mask": mask,
        },
        fields,
    )


def _plain(place: Any) -> Any:
    """Convert an index tensor to NumPy; other indices are unchanged."""
    return place.cpu().numpy() if isinstance(place, torch.Tensor) else place


def _same(left: Any, right: Any) -> bool:
    """Return whether two fields, or two of their values, are equal. NaN equals NaN."""
    if left is right:
        return True
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        both = isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)
        return both and bool(torch.equal(left, right))
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        if left.dtype == object or right.dtype == object:
            same = (_same(a, b) for a, b in zip(left, right, strict=False))
            return left.shape == right.shape and all(same)
        return bool(np.array_equal(left, right))
    if isinstance(left, float) and isinstance(right, float) and left != left:
        return right != right
    return bool(left == right)


def _alike(values: Sequence[Any]) -> bool:
    """Return whether all values are tensors of one shape, so that they can be stacked."""
    return all(isinstance(v, torch.Tensor) for v in values) and len({v.shape for v in values}) == 1


def _objects(values: Any) -> np.ndarray[Any, Any]:
    """Return a 1-D object array with one entry per row, whatever the type of the values."""
    if isinstance(values, np.ndarray) and values.dtype == object:
        return values
    array = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        array[i] = value
    return array
