"""Ragged columns: `TrainBatch` from lists, parts of a batch, and its columns padded to (N, W).

Called by whatever makes or cuts batches: the rollout's rows, the loops, packing. Knows nothing of
samples, models or losses.

Shapes: N rows, T tokens of all rows, W tokens of the longest row.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from slipstream.errors import DataError
from slipstream.types import FLOAT_COLUMNS, TrainBatch, TrainRow

V = TypeVar("V", int, float)

_OPTIONAL = tuple(name for name in FLOAT_COLUMNS if name != "loss_mask")


def train_batch(rows: Sequence[TrainRow], *, temperature: float = 1.0) -> TrainBatch:
    """A batch of rows that are given as lists.

    Rows may lack `old_log_probs` one by one: such a row is on-policy. The other columns belong to
    all rows or to none.

    Raises:
        DataError: a list of another length than the row's tokens, or a column that only some rows
            have.
    """
    for index, row in enumerate(rows):
        _check_lengths(index, row)
    for name in (*_OPTIONAL, "kept_ids"):
        absent = [i for i, row in enumerate(rows) if getattr(row, name) is None]
        if name != "old_log_probs" and 0 < len(absent) < len(rows):
            raise DataError(
                f"row {absent[0]} has no {name}, but other rows of the batch have; give them to "
                "all rows or to none"
            )
    kept = [row.kept_ids for row in rows if row.kept_ids is not None]
    has_old = [row.old_log_probs is not None for row in rows]
    columns: dict[str, Any] = {}
    for name in _OPTIONAL:
        lists = [getattr(row, name) for row in rows]
        if any(values is not None for values in lists):
            filled = [
                [0.0] * len(row.tokens) if values is None else values
                for row, values in zip(rows, lists, strict=True)
            ]
            columns[name] = floats(filled)
    return TrainBatch(
        starts=[0, *accumulate(len(row.tokens) for row in rows)],
        tokens=integers(row.tokens for row in rows),
        loss_mask=floats((row.loss_mask for row in rows), exact=True),
        has_old_log_probs=torch.tensor(has_old) if any(has_old) and not all(has_old) else None,
        kept_ids=kept or None,
        uids=[row.uid for row in rows],
        keys=[row.key for row in rows],
        temperature=temperature,
        **columns,
    )


def integers(lists: Iterable[Sequence[int]]) -> Tensor:
    """(T,) int64: the values of all lists."""
    return _tensor(array("q"), lists, torch.int64)


def floats(lists: Iterable[Sequence[float]], *, exact: bool = False) -> Tensor:
    """(T,) float32: the values of all lists. With `exact` float64, unless float32 has all of them:
    a loss mask may have weights such as 0.1, whose sum is taken in float64."""
    if not exact:
        return _tensor(array("f"), lists, torch.float32)
    wide = _tensor(array("d"), lists, torch.float64)
    single = wide.float()
    return single if torch.equal(single.double(), wide) else wide


def _tensor(values: array[V], lists: Iterable[Sequence[V]], dtype: torch.dtype) -> Tensor:
    """`values`, filled with all lists, as a tensor of the same memory: faster than
    `torch.tensor`, which looks at each element's type."""
    for given in lists:
        values.extend(given)
    return torch.frombuffer(values, dtype=dtype) if values else torch.empty(0, dtype=dtype)


def select_rows(batch: TrainBatch, indices: Sequence[int]) -> TrainBatch:
    """The rows `indices` of `batch`, in this order. Successive rows share memory with it.

    If the batch has sequences, `indices` must hold all rows of a sequence one after another.
    """
    if list(indices) == list(range(len(batch))):
        return replace(batch)
    runs = _runs(indices)
    cuts = [slice(batch.starts[first], batch.starts[last]) for first, last in runs]
    lengths = batch.lengths
    made: dict[int, Tensor] = {}

    def part(column: Tensor | None) -> Tensor | None:
        if column is None:
            return None
        if id(column) not in made:
            parts = [column[cut] for cut in cuts]
            made[id(column)] = parts[0] if len(parts) == 1 else torch.cat([column[:0], *parts])
        return made[id(column)]

    has_old, kept = batch.has_old_log_probs, batch.kept_ids
    columns: dict[str, Any] = {
        name: part(getattr(batch, name)) for name in ("tokens", *FLOAT_COLUMNS)
    }
    return replace(
        batch,
        starts=[0, *accumulate(lengths[i] for i in indices)],
        sequences=_selected_sequences(batch, indices),
        has_old_log_probs=None if has_old is None else has_old[list(indices)],
        kept_ids=None if kept is None else [kept[i] for i in indices],
        uids=[batch.uids[i] for i in indices],
        keys=[batch.keys[i] for i in indices],
        **columns,
    )


def _selected_sequences(batch: TrainBatch, indices: Sequence[int]) -> list[int] | None:
    if batch.sequences is None:
        return None
    first = set(batch.sequences)
    return [*(n for n, index in enumerate(indices) if index in first), len(indices)]


def _runs(indices: Sequence[int]) -> list[tuple[int, int]]:
    """`indices` as `[first, last)` ranges of successive numbers."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and runs[-1][1] == index:
            runs[-1] = (runs[-1][0], index + 1)
        else:
            runs.append((index, index + 1))
    return runs


def padded(values_T: Tensor, starts: Sequence[int], *, dtype: torch.dtype | None = None) -> Tensor:
    """(N, W): a column with zeros behind the end of each row; float32 without `dtype`."""
    width = max((end - start for start, end in pairwise(starts)), default=1)
    out = torch.zeros(len(starts) - 1, max(width, 1), dtype=dtype)
    for row, (start, end) in zip(out, pairwise(starts), strict=True):
        row[: end - start] = values_T[start:end]
    return out


def unpadded(values_NW: Tensor, starts: Sequence[int]) -> Tensor:
    """(T,): the column that `padded` made (N, W) of."""
    rows = zip(values_NW, pairwise(starts), strict=True)
    return torch.cat([values_NW.new_empty(0), *(row[: end - start] for row, (start, end) in rows)])


def rows_of_column(values_T: Tensor, starts: Sequence[int]) -> list[Tensor]:
    """A column as one tensor (a view) per row."""
    return [values_T[start:end] for start, end in pairwise(starts)]


def any_of_rows(flags_T: Tensor, starts: Sequence[int]) -> list[bool]:
    """For each row, whether any of its flags is set."""
    counts = torch.cat([torch.zeros(1, dtype=torch.int64), flags_T.cumsum(0)])
    return (counts[list(starts)].diff() > 0).tolist()


def _check_lengths(index: int, row: TrainRow) -> None:
    length = len(row.tokens)
    for name in (*FLOAT_COLUMNS, "kept_ids"):
        values = getattr(row, name)
        if values is not None and len(values) != length:
            raise DataError(
                f"row {index} (uid {row.uid!r}): {name} has {len(values)} entries for {length} "
                "tokens; every per-token list must have the row's length"
            )
