"""verl's `DataProto`: rows of tensors and of other values, with its methods.

Tensors are in `batch`, all other values in `non_tensor_batch`. Such batches are built only for user
code that was written for verl (`signatures`, samplers and data sets with callbacks), and for
learned reward models.
"""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slipstream.rewards.data_columns import (
    TensorColumns,
    alike,
    check_agree,
    objects,
    picked,
    plain,
    row_places,
    same,
)
from slipstream.types import Sample

_METRICS = "metrics"
"""The key of `meta_info` whose values `concat` collects in lists."""


class _Padding(type):
    _auto = False

    @property
    def auto_padding(cls) -> bool:
        """Whether `chunk` accepts numbers of rows that it cannot divide evenly. The environment
        variable VERL_AUTO_PADDING=true sets it, too."""
        return cls._auto or os.environ.get("VERL_AUTO_PADDING", "").upper() in ("TRUE", "1")

    @auto_padding.setter
    def auto_padding(cls, enabled: bool) -> None:
        cls._auto = enabled


class DataProtoConfig(metaclass=_Padding):
    """Settings of all batches: `DataProtoConfig.auto_padding`."""

    auto_padding_key = "_verl_auto_padding"
    """The key of `meta_info` that has the setting of one batch."""


class DataProto:
    """Rows of tensors and of other values.

    `data[i]` is one row, without the first dimension. `data[i:j]`, and indexing with a list, array
    or tensor of positions, or with a mask, return batches.
    """

    def __init__(
        self,
        batch: Mapping[str, torch.Tensor] | None = None,
        non_tensor_batch: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> None:
        """Raises ValueError if the fields differ in length."""
        tensors: dict[str, Any] = {} if batch is None else dict(batch.items())
        given: Mapping[str, Any] = {} if non_tensor_batch is None else non_tensor_batch
        others: dict[str, Any] = {k: objects(v) for k, v in given.items()}
        lengths = {k: len(v) for k, v in tensors.items()}
        lengths |= {k: len(v) for k, v in others.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the fields of a batch differ in length: {lengths}")
        self._others = others
        self._tensors = TensorColumns(tensors, others, next(iter(lengths.values()), 0))
        self.meta_info = dict(meta_info or {})

    @property
    def batch(self) -> TensorColumns:
        """The tensors."""
        return self._tensors

    @batch.setter
    def batch(self, tensors: Mapping[str, torch.Tensor] | None) -> None:
        self._replace(tensors, self._others)

    @property
    def non_tensor_batch(self) -> dict[str, Any]:
        """The other fields, as arrays (B, ...)."""
        return self._others

    @non_tensor_batch.setter
    def non_tensor_batch(self, others: Mapping[str, Any]) -> None:
        self._replace(self._tensors, others)

    def _replace(
        self, tensors: Mapping[str, torch.Tensor] | None, others: Mapping[str, Any]
    ) -> None:
        # While user code replaces both in turn, their lengths may differ.
        arrays = others if others is self._others else {k: objects(v) for k, v in others.items()}
        self._others = dict(arrays)
        plain_tensors = {} if tensors is None else dict(tensors.items())
        columns = plain_tensors or self._others
        size = len(next(iter(columns.values()))) if columns else 0
        self._tensors = TensorColumns(plain_tensors, self._others, size)

    @classmethod
    def from_single_dict(
        cls,
        data: Mapping[str, Any],
        meta_info: Mapping[str, Any] | None = None,
        auto_padding: bool = False,
    ) -> DataProto:
        """Build a batch from one mapping of tensors and other values, as `collate_fn` returns."""
        tensors = {k: v for k, v in data.items() if isinstance(v, torch.Tensor)}
        others = {k: v for k, v in data.items() if k not in tensors}
        return cls.from_dict(tensors, others, meta_info, auto_padding=auto_padding)

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> DataProto:
        """Build a batch like the constructor, under verl's name and keywords.

        `auto_padding` is the batch's `is_padding_enabled`. Raises ValueError if `num_batch_dims` is
        not 1, because a batch is a list of rows (as in verl).
        """
        _check_batch_dims(num_batch_dims)
        meta = dict(meta_info or {})
        if auto_padding:
            meta[DataProtoConfig.auto_padding_key] = True
        return cls(tensors, non_tensors, meta)

    @classmethod
    def from_tensordict(
        cls,
        tensor_dict: Any,
        meta_info: Mapping[str, Any] | None = None,
        num_batch_dims: int = 1,
    ) -> DataProto:
        """Build a batch from a TensorDict.

        Stacked non-tensor entries, one per row, become fields; single ones are added to
        `meta_info`. Raises ValueError for other entries, such as a TensorDict in another, and
        ImportError without the package tensordict.
        """
        _check_batch_dims(num_batch_dims)
        tensordict = _tensordict()
        tensors: dict[str, torch.Tensor] = {}
        others: dict[str, Any] = {}
        meta = dict(meta_info or {})
        for key, value in tensor_dict.items():
            if isinstance(value, torch.Tensor):
                tensors[key] = value
            elif isinstance(value, tensordict.NonTensorStack):
                others[key] = objects([entry.data for entry in value])
            elif isinstance(value, tensordict.NonTensorData):
                meta[key] = value.data
            else:
                raise ValueError(
                    f"{key!r} is a {type(value).__name__}, which cannot be a field of a batch; "
                    "flatten it (flatten_keys) or exclude it first"
                )
        return cls(tensors, others, meta)

    def to_tensordict(self) -> Any:
        """Return the batch as a TensorDict (B,), the inverse of `from_tensordict`.

        Raises ImportError without the package tensordict, and ValueError if a name occurs twice.
        """
        tensordict = _tensordict()
        others, size = self.non_tensor_batch, torch.Size([len(self)])
        twice = (set(self.batch) & set(others)) | (set(self.meta_info) & {*self.batch, *others})
        if twice:
            raise ValueError(
                f"a TensorDict has one field per name, but there are several named "
                f"{', '.join(sorted(twice))}; rename or pop one of them"
            )
        result = tensordict.TensorDict(dict(self.batch), batch_size=size)
        for key, values in others.items():
            entries = [tensordict.NonTensorData(value) for value in values]
            result[key] = tensordict.NonTensorStack.from_list(entries)
        for key, value in self.meta_info.items():
            result[key] = tensordict.NonTensorData(value, batch_size=size)
        return result

    @classmethod
    def concat(cls, data: Sequence[DataProto]) -> DataProto:
        """Concatenate the rows of all parts, and merge their `meta_info`.

        `meta_info["metrics"]`, a mapping or a list of mappings in each part, becomes one mapping
        from each name to the list of its values. Raises ValueError if there is no part, if the
        fields differ, or if parts have different values for another key of `meta_info`.
        """
        if not data:
            raise ValueError("no batch to concatenate")
        first = data[0]
        for part in data[1:]:
            first._check_fields(part)
        return type(first)(
            {k: torch.cat([p.batch[k] for p in data]) for k in first.batch},
            {k: np.concatenate([p.non_tensor_batch[k] for p in data]) for k in first._others},
            _merged([part.meta_info for part in data]),
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

    def check_consistency(self) -> None:
        """Raise ValueError if fields differ in length, or a field has the wrong type."""
        for key, value in self.non_tensor_batch.items():
            if not isinstance(value, np.ndarray):
                raise ValueError(
                    f"non_tensor_batch[{key!r}] is {type(value).__name__}, not an array; set "
                    "np.array(values, dtype=object)"
                )
        DataProto(self.batch, self.non_tensor_batch)

    def union(self, other: DataProto) -> DataProto:
        """Add the fields of `other` to this batch and return it.

        Raises ValueError if the lengths differ, or if a shared field or a shared key of `meta_info`
        has different values.
        """
        check_agree(self.batch, other.batch, "both batches have a field")
        check_agree(self._others, other._others, "both batches have a field")
        check_agree(self.meta_info, other.meta_info, "both batches have meta_info")
        merged = DataProto(
            {**self.batch, **other.batch},
            {**self.non_tensor_batch, **other.non_tensor_batch},
            {**self.meta_info, **other.meta_info},
        )
        self._tensors, self._others = merged._tensors, merged._others
        self.meta_info = merged.meta_info
        return self

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> DataProto:
        """Return a batch of some fields (None: all).

        With `deepcopy`, everything but the tensors is copied. As in verl, missing non-tensor fields
        and missing keys of `meta_info` are left out. Raises KeyError if a tensor is missing.
        """
        tensors: Mapping[str, torch.Tensor] = self.batch
        if batch_keys is not None:
            tensors = {k: self.batch.tensor(k) for k in batch_keys}
        others = _some(self._others, non_tensor_batch_keys)
        meta = _some(self.meta_info, meta_info_keys)
        if deepcopy:
            others, meta = copy.deepcopy(others), copy.deepcopy(meta)
        return type(self)(tensors, others, meta)

    def pop(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> DataProto:
        """Remove fields (None: none) and return them as a batch.

        Raises KeyError, and removes nothing, if a field is missing.
        """
        tensors = {k: self.batch.tensor(k) for k in batch_keys or ()}
        others = {k: self.non_tensor_batch[k] for k in non_tensor_batch_keys or ()}
        meta = {k: self.meta_info[k] for k in meta_info_keys or ()}
        for names, table in ((tensors, self.batch), (others, self._others), (meta, self.meta_info)):
            for key in names:
                del table[key]
        return type(self)(tensors, others, meta)

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> DataProto:
        """Rename tensors in place and return the batch. Raises KeyError if one is missing."""
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys)
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys)
        if len(old) != len(new):
            raise ValueError(f"{len(old)} fields cannot be renamed to {len(new)} names")
        tensors = {key: self.batch.tensor(key) for key in old}
        for key in old:
            del self.batch[key]
        for name, key in zip(new, old, strict=True):
            self.batch[name] = tensors[key]
        return self

    def select_idxs(self, idxs: Any) -> DataProto:
        """Return the rows at these positions, or at which a mask is true."""
        chosen: DataProto = self[
            idxs if isinstance(idxs, np.ndarray | torch.Tensor) else list(idxs)
        ]
        return chosen

    def slice(
        self, start: int | None = None, end: int | None = None, step: int | None = None
    ) -> DataProto:
        """Return every `step`-th row from `start` up to, but not including, `end`."""
        rows: DataProto = self[start:end:step]
        return rows

    def reorder(self, indices: Any) -> None:
        """Reorder the rows in place."""
        ordered = self.select_idxs(indices)
        self._tensors, self._others = ordered._tensors, ordered._others

    def split(self, split_size: int) -> list[DataProto]:
        """Split into batches of `split_size` rows; the last one may have fewer."""
        return [self[at : at + split_size] for at in range(0, len(self), split_size)]

    def chunk(self, chunks: int) -> list[DataProto]:
        """Split into `chunks` batches of equal size.

        With padding enabled, sizes may differ: those of `torch.chunk`. Raises ValueError if it is
        impossible.
        """
        if chunks < 1 or (len(self) % chunks and not self.is_padding_enabled()):
            raise ValueError(
                f"{len(self)} rows cannot be divided into {chunks} equal parts; pad them with "
                "pad_dataproto_to_divisor"
            )
        size = -(-len(self) // chunks)
        parts = self.split(size) if size else [self] * chunks
        if len(parts) != chunks:
            raise ValueError(
                f"{len(self)} rows make {len(parts)} parts of {size}, not {chunks}; pad them with "
                "pad_dataproto_to_divisor"
            )
        return parts

    def is_padding_enabled(self) -> bool:
        """Return whether `chunk` may return parts of different sizes."""
        own = bool(self.meta_info.get(DataProtoConfig.auto_padding_key))
        return own or DataProtoConfig.auto_padding

    def padding(self, padding_size: int, padding_candidate: str = "") -> None:
        """Append `padding_size` copies of the first row ("first") or of the last row, in place."""
        at = 0 if padding_candidate == "first" else len(self) - 1
        self.reorder([*range(len(self)), *[at] * padding_size])

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[DataProto]:
        """Yield mini-batches for `epochs` passes, in the order of the rows.

        `dataloader_kwargs` are options of a `torch.utils.data.DataLoader`: with `shuffle=True`,
        each pass has a new random order, which depends on `seed`. Raises ValueError if the number
        of rows is not a multiple of `mini_batch_size`.
        """
        if mini_batch_size < 1 or len(self) % mini_batch_size:
            raise ValueError(f"{len(self)} rows do not fill mini-batches of {mini_batch_size}")
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        places: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
            range(len(self)),  # type: ignore[arg-type]
            batch_size=mini_batch_size,
            collate_fn=list,
            generator=generator,
            **(dataloader_kwargs or {}),
        )
        return (self[chosen] for _ in range(epochs) for chosen in places)

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Repeat each row (`interleave`), or the whole batch, `repeat_times` times."""
        rows = np.arange(len(self))
        order = np.repeat(rows, repeat_times) if interleave else np.tile(rows, repeat_times)
        return self.select_idxs(torch.from_numpy(order))

    def sample_level_repeat(self, repeat_times: Any) -> DataProto:
        """Repeat each row by its own number, from a list, array or tensor (B,)."""
        if not isinstance(repeat_times, list | tuple | np.ndarray | torch.Tensor):
            raise TypeError(f"repeat_times must be a list or a tensor, got {type(repeat_times)}")
        times = np.asarray(plain(repeat_times))
        if times.shape != (len(self),):
            raise ValueError(
                f"repeat_times has the shape {times.shape}, but the batch has {len(self)} rows"
            )
        return self.select_idxs(torch.from_numpy(np.repeat(np.arange(len(self)), times)))

    def unfold_column_chunks(
        self, n_split: int, split_keys: Sequence[str] | None = None
    ) -> DataProto:
        """Split each row into `n_split` rows.

        Fields of `split_keys` (B, T, ...) become (B n_split, T / n_split, ...); all others are
        repeated. Raises ValueError if T is not a multiple of `n_split`.
        """
        keys = frozenset(split_keys or ())

        def unfold(key: str, value: Any) -> Any:
            if value.ndim < 2 or value.shape[1] % n_split:
                raise ValueError(
                    f"{key!r} has the shape {tuple(value.shape)}: its second dimension cannot be "
                    f"divided into {n_split} equal parts"
                )
            shape = (value.shape[0] * n_split, value.shape[1] // n_split, *value.shape[2:])
            return value.reshape(shape)

        repeated = self.repeat(n_split)
        return type(self)(
            {k: unfold(k, self.batch[k]) if k in keys else v for k, v in repeated.batch.items()},
            {
                k: unfold(k, self._others[k]) if k in keys else v
                for k, v in repeated._others.items()
            },
            self.meta_info,
        )

    def to(self, device: Any) -> DataProto:
        """Move the tensors to `device` and return the batch."""
        for key, value in self.batch.items():
            self.batch[key] = value.to(device)
        return self

    def save_to_disk(self, filepath: str | Path) -> None:
        """Write the batch to a file, as a pickle."""
        Path(filepath).write_bytes(pickle.dumps(self))

    @staticmethod
    def load_from_disk(filepath: str | Path) -> DataProto:
        """Read a batch that `save_to_disk` wrote. A pickle can run code: read only your own files.

        Raises ValueError if the file has no batch.
        """
        found = pickle.loads(Path(filepath).read_bytes())
        if not isinstance(found, DataProto):
            raise ValueError(f"{filepath} has a {type(found).__name__}, not a DataProto")
        return found

    def get_data_info(self) -> str:
        """Return a text with the name, shape and type of each field, one per line."""
        lines = ["batch"]
        for key, tensor in self.batch.items():
            lines.append(f"  {key}: {tuple(tensor.shape)} ({tensor.dtype}) {tensor.device}")
        lines.append("non_tensor_batch")
        lines.extend(f"  {k}: ndarray{v.shape} ({v.dtype})" for k, v in self._others.items())
        lines.append("meta_info")
        lines.extend(f"  {k}: {_kind(v)}" for k, v in self.meta_info.items())
        return "\n".join(lines)

    def print_summary(self, desc: str) -> None:
        """Print `get_data_info` under a title."""
        print(f"{desc}\n{self.get_data_info()}")

    def print_size(self, prefix: str = "") -> None:
        """Print the size of the tensors and of the arrays in GB (1024^3 bytes)."""
        tensors = sum(v.element_size() * v.numel() for v in self.batch.values()) / 1024**3
        arrays = sum(v.nbytes for v in self._others.values()) / 1024**3
        text = f"batch: {tensors} GB, non_tensor_batch: {arrays} GB"
        print(f"{prefix}, {text}" if prefix else text)

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
        if isinstance(place, int | np.integer) and not isinstance(place, bool):
            at = int(place)
            if not -len(self) <= at < len(self):
                raise IndexError(f"row {at} of a batch of {len(self)}")
            return DataProtoItem(
                {k: v[at] for k, v in self.batch.items()},
                {k: v[at] for k, v in self.non_tensor_batch.items()},
                self.meta_info,
            )
        if not isinstance(place, slice | list | np.ndarray | torch.Tensor):
            raise TypeError(
                f"a batch is indexed by a row number, a slice, or a list, array or tensor, got "
                f"{place!r}; fields are in batch[...] and non_tensor_batch[...]"
            )
        rows = DataProto.__new__(type(self))
        places = row_places(place, len(self))
        rows._others = {k: v[places] for k, v in self.non_tensor_batch.items()}
        tensors = {k: picked(v, place, places) for k, v in self.batch.items()}
        rows._tensors = TensorColumns(tensors, rows._others, len(places))
        rows.meta_info = dict(self.meta_info)
        return rows

    def __iter__(self) -> Iterator[DataProtoItem]:
        return (self[i] for i in range(len(self)))


class DataProtoItem:
    """One row of a `DataProto`: the value of each field."""

    def __init__(
        self,
        batch: Mapping[str, Any] | None = None,
        non_tensor_batch: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> None:
        self.non_tensor_batch = dict(non_tensor_batch or {})
        self.batch = TensorColumns(
            {} if batch is None else dict(batch.items()), self.non_tensor_batch, None
        )
        self.meta_info = dict(meta_info or {})


def proto_of(samples: Sequence[Sample], responses: Sequence[str]) -> DataProto:
    """Return finished samples as the batch that verl passes to reward managers.

    B rows of P prompt tokens and R response tokens (the maximum lengths; R is at least 1); padding
    is 0. Tensors:
    `prompts` (B, P), padded on the left; `responses` and `response_mask` (B, R), padded on the
    right; `input_ids`, `attention_mask` and `position_ids` (B, P + R). Other fields:
    `data_source`, `reward_model` (with `ground_truth`), `extra_info`, `uid`, `raw_prompt`, and
    `response_text`, which is `responses`, the decoded texts. Each entry of `extra_info` is also a
    field of its own; if all its values are tensors of one shape, it is a stacked tensor.
    """
    width = max((len(s.branches[0].prompt_ids) for s in samples), default=0)
    # verl's managers write the reward of an empty response at index -1, so there must be one.
    length = max((1, *(len(s.all_response_ids) for s in samples)))
    prompts = torch.zeros((len(samples), width), dtype=torch.long)
    answers = torch.zeros((len(samples), length), dtype=torch.long)
    attention = torch.zeros((len(samples), width + length), dtype=torch.long)
    mask = torch.zeros((len(samples), length), dtype=torch.long)
    for i, sample in enumerate(samples):
        prompt, answer = sample.branches[0].prompt_ids, sample.all_response_ids
        prompts[i, width - len(prompt) :] = torch.tensor(prompt, dtype=torch.long)
        answers[i, : len(answer)] = torch.tensor(answer, dtype=torch.long)
        attention[i, width - len(prompt) : width + len(answer)] = 1
        loss_mask = [m for b in sample.branches for m in b.loss_mask[len(b.prompt_ids) :]]
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
    stacked = {key: torch.stack(list(values)) for key, values in columns.items() if alike(values)}
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


def _check_batch_dims(num_batch_dims: int) -> None:
    if num_batch_dims != 1:
        raise ValueError(
            f"num_batch_dims={num_batch_dims} is not supported: a batch is a list of rows; set "
            "num_batch_dims=1"
        )


def _some(table: Mapping[str, Any], keys: Sequence[str] | None) -> Mapping[str, Any]:
    return table if keys is None else {k: v for k, v in table.items() if k in keys}


def _merged(infos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    reported: list[Any] = []
    for info in infos:
        for key, value in info.items():
            if key == _METRICS:
                found = [] if value is None else value if isinstance(value, list) else [value]
                reported.extend(found)
            elif key in merged and not same(merged[key], value):
                raise ValueError(
                    f"batches have different values for meta_info[{key!r}]: {merged[key]!r} and "
                    f"{value!r}; pop the key first"
                )
            else:
                merged.setdefault(key, value)
    if reported:
        merged[_METRICS] = dict_of_lists(reported)
    return merged


def dict_of_lists(list_of_dict: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the values of each name of the mappings in a list, in order.

    A later mapping may lack a name. Raises ValueError if an entry is no mapping, or has a name that
    the first one lacks.
    """
    result: dict[str, list[Any]] = {}
    for number, row in enumerate(list_of_dict):
        if not isinstance(row, Mapping):
            raise ValueError(f"metrics must be mappings, got {type(row).__name__}")
        for key, value in row.items():
            if number and key not in result:
                raise ValueError(f"{key!r} is not in the first of {len(list_of_dict)} mappings")
            result.setdefault(key, []).append(value)
    return result


def _kind(value: Any) -> str:
    """Return the type of a value, and of the entries in it."""
    match value:
        case list():
            return f"list[{'|'.join(sorted({_kind(entry) for entry in value[:3]})) or '...'}]"
        case tuple():
            return f"tuple({', '.join(_kind(entry) for entry in value)})"
        case dict() if value:
            key, entry = next(iter(value.items()))
            return f"dict[{_kind(key)}: {_kind(entry)}]"
        case np.ndarray():
            return f"ndarray{value.shape} ({value.dtype})"
        case _:
            return type(value).__name__


def _tensordict() -> Any:
    try:
        import tensordict
    except ImportError as error:
        raise ImportError(
            f"TensorDicts need the package tensordict, 0.10 or later ({error}); run: "
            "pip install tensordict"
        ) from error
    return tensordict
