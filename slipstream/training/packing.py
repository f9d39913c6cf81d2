"""Packs rows of any length into micro-batches within a token budget.

The plan is deterministic: rows are sorted by length (ties by index), or by the longest row of their
group if they share prompts. If the policy can compute
concatenated sequences (`models.decoder`), nothing is padded and micro-batches fill the budget.
Otherwise rows are padded on the right, and the plan minimizes padding. A padded length is a
multiple of 16, so that few shapes occur and matrix products satisfy the row rules of exact mode.
This module knows shapes, not models or losses. `step` calls it.

Shapes: B rows, T padded length, N target tokens, M = N padded for the LM head.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from slipstream.errors import DataError
from slipstream.models.config import ContextLimit
from slipstream.models.numerics import ROW_MULTIPLE, round_up
from slipstream.models.shared_rows import SharedRows
from slipstream.types import FLOAT_COLUMNS, TrainBatch

LENGTH_MULTIPLE = 16
OVERHEAD_TOKENS = 64
"""The fixed cost of a micro-batch (packing weights, starting kernels), in tokens."""
LEAST_SHARED = 0.2
"""Prompts of a micro-batch are shared if that saves at least this share of its tokens. Below it,
the copies for attention take as much time as is saved (docs/log/training_step.md)."""
MIN_HEAD_ROWS = 12
"""Matrix products compute each row in the same way (exact mode) if there are at least 12 rows, in
multiples of four."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceLayout:
    """Places of the tokens of a micro-batch if the rows of a sequence are put into one row.

    `source` are flat indices of the tokens in (B, T), and `target` those in the result, which has
    `rows` rows of `width` tokens.
    """

    source: Tensor
    target: Tensor
    rows: int
    width: int

    @classmethod
    def of(cls, sequences: Sequence[int], lengths: Sequence[int], width: int) -> SequenceLayout:
        """The layout of rows with the given sequences and lengths, padded to `width`."""
        number: dict[int, int] = {}
        used: list[int] = []
        places: list[tuple[int, int]] = []
        for sequence, length in zip(sequences, lengths, strict=True):
            n = number.setdefault(sequence, len(number))
            if n == len(used):
                used.append(0)
            places.append((n, used[n]))
            used[n] += length
        wide = max(used)
        ranges = [torch.arange(length) for length in lengths]
        return cls(
            source=torch.cat([b * width + own for b, own in enumerate(ranges)]),
            target=torch.cat(
                [n * wide + start + own for (n, start), own in zip(places, ranges, strict=True)]
            ),
            rows=len(used),
            width=wide,
        )

    def apply(self, values_BT: Tensor) -> Tensor:
        """The values (B, T) with one row for each sequence. Differentiable."""
        flat = values_BT.flatten()[self.source.to(values_BT.device)]
        out = values_BT.new_zeros(self.rows * self.width)
        return out.index_put((self.target.to(out.device),), flat).view(self.rows, self.width)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Some rows of a batch as tensors.

    `ids` and `positions` are the inputs of a forward pass: (B, T), or with `lengths` one row of
    concatenated sequences, of which `shared` tells the common prompts. `starts` are the flat
    indices of each row's first token in them. `mask` (B, T) is the loss mask, and `target_slots`
    (N,) are the flat indices of target tokens in it. `head_rows` (M,) are the flat indices of the
    tokens before the targets, whose hidden states predict them, and `labels` (M,) are the target
    ids. Both are padded for the row rule; results beyond N are dropped. A `filler` is computed only
    to match another process's forward pass, and its results are ignored.
    """

    indices: list[int]
    ids: Tensor
    positions: Tensor
    lengths: list[int] | None
    starts: list[int]
    mask: Tensor
    head_rows: Tensor
    labels: Tensor
    target_slots: Tensor
    shared: SharedRows | None = None
    filler: bool = False
    layout: SequenceLayout | None = None
    """How its rows form sequences; None: each row is a sequence."""

    def scatter(self, flat: Tensor) -> Tensor:
        """Spread values (N,) of target tokens to (B, T), with zeros elsewhere. Differentiable."""
        spread = flat.new_zeros(self.mask.numel()).index_put((self.target_slots,), flat)
        return spread.view(self.mask.shape)


def plan_micro_batches(
    lengths: Mapping[int, int],
    *,
    max_tokens: int | None,
    max_rows: int | None = None,
    padded: bool = True,
    groups: Mapping[int, int] | None = None,
) -> list[list[int]]:
    """Split rows, given as index -> length, into micro-batches, short rows first.

    `max_tokens` limits the size of a micro-batch, including padding, and `max_rows` its number of
    rows; None is no limit. Padded rows are split, in order of length, with the least padding, where
    each further micro-batch counts as `OVERHEAD_TOKENS`. Rows without padding fill the budget; with
    `groups`, index -> group, rows of a group follow each other.

    Raises:
        DataError: a row does not fit into a micro-batch of its own.
    """
    order = sorted(lengths, key=lambda i: (lengths[i], i))
    size_of = padded_length if padded else int
    if order and max_tokens is not None and size_of(lengths[order[-1]]) > max_tokens:
        longest = order[-1]
        raise DataError(
            f"row {longest} has {lengths[longest]} tokens"
            + (f" ({padded_length(lengths[longest])} padded)" if padded else "")
            + f", which is more than the micro-batch budget of {max_tokens}; raise "
            "ppo_max_token_len_per_gpu or shorten data.max_prompt_length / "
            "data.max_response_length"
        )
    if not padded:
        if groups is not None:
            order = _by_groups(order, lengths, groups)
        return _filled(order, lengths, max_tokens, max_rows)
    # Dynamic programming over the ends of groups of equal width: best[end] is (cost, start, rows
    # per micro-batch) of the last group that ends there.
    widths = [padded_length(lengths[i]) for i in order]
    ends = [k + 1 for k, width in enumerate(widths) if widths[k + 1 : k + 2] != [width]]
    best: dict[int, tuple[int, int, int]] = {0: (0, 0, 0)}
    for end in ends:
        rows_at_once = _rows_at_once(widths[end - 1], len(order), max_tokens, max_rows)
        options = []
        for start, (cost, _, _) in best.items():
            parts = -(-(end - start) // rows_at_once)
            size = (end - start) * widths[end - 1]
            options.append((cost + size + parts * OVERHEAD_TOKENS, start, rows_at_once))
        best[end] = min(options)
    plan: list[list[int]] = []
    end = len(order)
    while end:
        _, start, rows_at_once = best[end]
        cuts = range(start, end, rows_at_once)
        plan.extend(order[cut : min(cut + rows_at_once, end)] for cut in reversed(cuts))
        end = start
    return plan[::-1]


def plan_sequences(
    lengths: Mapping[int, int],
    sequences: Mapping[int, int],
    *,
    max_tokens: int | None,
    max_rows: int | None = None,
    padded: bool = True,
) -> list[list[int]]:
    """Split rows, given as index -> length, into micro-batches that hold whole sequences, short
    ones first. `sequences` is index -> sequence. The limits are those of `plan_micro_batches`.

    Raises:
        DataError: a sequence does not fit into a micro-batch of its own.
    """
    units: dict[int, list[int]] = {}
    for index in sorted(lengths):
        units.setdefault(sequences[index], []).append(index)

    def fits(rows: Sequence[int]) -> bool:
        own = [lengths[i] for i in rows]
        return fits_micro_batch(own, max_tokens=max_tokens, max_rows=max_rows, padded=padded)

    plan: list[list[int]] = []
    for unit in sorted(units.values(), key=lambda rows: (max(lengths[i] for i in rows), rows[0])):
        if not fits(unit):
            raise DataError(
                f"the {len(unit)} branches of an episode (rows {unit[0]} to {unit[-1]}) need "
                f"{_size([lengths[i] for i in unit], padded)} tokens in one micro-batch, but its "
                f"limits are {max_tokens} tokens and {max_rows} rows; raise "
                "ppo_max_token_len_per_gpu or ppo_micro_batch_size_per_gpu, or set "
                "actor_rollout_ref.rollout.multi_turn.history=append, which makes no branches"
            )
        if plan and fits([*plan[-1], *unit]):
            plan[-1] += unit
        else:
            plan.append(list(unit))
    return plan


def fits_micro_batch(
    lengths: Sequence[int], *, max_tokens: int | None, max_rows: int | None, padded: bool
) -> bool:
    """Return whether rows of these lengths fit into one micro-batch."""
    few = max_rows is None or len(lengths) <= max_rows
    return few and (max_tokens is None or _size(lengths, padded) <= max_tokens)


def _size(lengths: Sequence[int], padded: bool) -> int:
    """The tokens of a micro-batch, with padding if it is padded."""
    return padded_length(max(lengths)) * len(lengths) if padded else sum(lengths)


def _by_groups(
    order: Sequence[int], lengths: Mapping[int, int], groups: Mapping[int, int]
) -> list[int]:
    """`order`, with the rows of a group together; groups with short rows come first."""
    longest: dict[int, int] = {}
    for i in order:
        longest[groups[i]] = max(longest.get(groups[i], 0), lengths[i])
    return sorted(order, key=lambda i: (longest[groups[i]], groups[i], lengths[i], i))


def _filled(
    order: Sequence[int], lengths: Mapping[int, int], max_tokens: int | None, max_rows: int | None
) -> list[list[int]]:
    plan: list[list[int]] = []
    tokens = 0
    for index in order:
        tokens += lengths[index]
        full = max_tokens is not None and tokens > max_tokens
        if not plan or full or (max_rows is not None and len(plan[-1]) == max_rows):
            plan.append([])
            tokens = lengths[index]
        plan[-1].append(index)
    return plan


def _rows_at_once(width: int, rows: int, max_tokens: int | None, max_rows: int | None) -> int:
    limits = [rows]
    if max_tokens is not None:
        limits.append(max_tokens // width)
    if max_rows is not None:
        limits.append(max_rows)
    return min(limits)


def padded_length(length: int) -> int:
    """The padded width of a row of `length` tokens."""
    return round_up(length, LENGTH_MULTIPLE)


def build_micro_batch(
    batch: TrainBatch,
    indices: Sequence[int],
    *,
    pad_id: int,
    max_positions: int,
    device: torch.device,
    padded: bool = True,
    groups: Mapping[int, int] | None = None,
) -> MicroBatch:
    """The rows `indices` of `batch` as one micro-batch.

    With `groups`, from `prompt_groups`, rows of a group share their prompt; `padded` must be false.
    """
    places = [batch.slice_of(i) for i in indices]
    lengths = [place.stop - place.start for place in places]
    width = padded_length(max(lengths))
    mask = torch.zeros(len(places), width)
    for b, place in enumerate(places):
        mask[b, : lengths[b]] = batch.loss_mask[place]
    mask[:, 0] = 0
    if padded:
        starts = [b * width for b in range(len(places))]
        ids = torch.full((len(places), width), pad_id)
        for b, place in enumerate(places):
            ids[b, : lengths[b]] = batch.tokens[place]
        # Padding may reach beyond the last position that the model knows; nothing looks at it.
        positions = torch.arange(width).clamp(max=max_positions - 1).expand(len(places), width)
    else:
        starts = [0, *accumulate(lengths)][:-1]
        ids = torch.cat([batch.tokens[place] for place in places])[None]
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
    shared = None
    if groups is not None:
        prefixes = [(groups[i], prompt_length(batch, i)) for i in indices]
        shared = SharedRows.of(prefixes, lengths)
        copied = sum(count for _, _, count in shared.copies)
        shared = shared if copied >= LEAST_SHARED * sum(lengths) else None
    layout = None
    if batch.sequences is not None:
        layout = SequenceLayout.of([sequence_of(batch)[i] for i in indices], lengths, width)
    slots = mask.flatten().nonzero().squeeze(-1)
    targets = torch.tensor(starts)[slots // width] + slots % width
    head_rows = max(round_up(len(slots), ROW_MULTIPLE), MIN_HEAD_ROWS)
    spare = torch.zeros(head_rows - len(slots), dtype=torch.int64)
    return MicroBatch(
        indices=list(indices),
        ids=ids.to(device),
        positions=positions.to(device),
        lengths=None if padded else lengths,
        starts=starts,
        mask=mask.to(device),
        head_rows=torch.cat([targets - 1, spare]).to(device),
        labels=ids.flatten()[torch.cat([targets, spare])].to(device),
        target_slots=slots.to(device),
        shared=shared,
        layout=layout,
    )


def sequence_of(batch: TrainBatch) -> list[int]:
    """The number of each row's sequence."""
    cuts = range(len(batch) + 1) if batch.sequences is None else batch.sequences
    return [n for n, (first, last) in enumerate(pairwise(cuts)) for _ in range(first, last)]


def prompt_length(batch: TrainBatch, index: int) -> int:
    """Number of tokens of a row before its first target token."""
    targets = batch.loss_mask[batch.slice_of(index)][1:].nonzero()
    return 1 + int(targets[0]) if len(targets) else int(batch.lengths[index])


def prompt_groups(batch: TrainBatch, indices: Iterable[int]) -> dict[int, int] | None:
    """Return index -> group of rows with the same prompt: the tokens before the first target.

    Returns None if sharing could save less than `LEAST_SHARED` of the rows' tokens.
    """
    known: dict[bytes, int] = {}
    found, tokens, saved = dict[int, int](), 0, 0
    for index in indices:
        place, length = batch.slice_of(index), prompt_length(batch, index)
        prompt = batch.tokens[place.start : place.start + length].numpy().tobytes()
        saved += length if prompt in known else 0
        tokens += place.stop - place.start
        found[index] = known.setdefault(prompt, len(known))
    return found if saved >= LEAST_SHARED * tokens else None


def column(
    values_T: Tensor | None, batch: TrainBatch, indices: Sequence[int], like: Tensor
) -> Tensor | None:
    """The rows `indices` of a column as (B, T), with dtype, device and shape of `like` and zeros
    behind the end of each row; None if the batch has no such column."""
    if values_T is None:
        return None
    out = torch.zeros(like.shape, dtype=like.dtype)
    for b, index in enumerate(indices):
        place = batch.slice_of(index)
        out[b, : place.stop - place.start] = values_T[place]
    return out.to(like.device)


def fill_rows(out_T: Tensor, batch: TrainBatch, micro: MicroBatch, values_BT: Tensor) -> None:
    """Put the (B, T) values of a micro-batch where the column `out_T` has its rows."""
    values_BT = values_BT.cpu()
    for index, values in zip(micro.indices, values_BT, strict=True):
        place = batch.slice_of(index)
        out_T[place] = values[: place.stop - place.start]


def check_batch(batch: TrainBatch, *, vocab_size: int, limit: ContextLimit) -> None:
    """Refuse what cannot be trained on, naming the row.

    Raises:
        DataError: no rows or no target token, a column of another length than the tokens, a token
            outside the vocabulary, or a row beyond the model's `limit`.
    """
    if not batch.num_target_tokens:
        raise DataError(
            f"a batch of {len(batch)} rows has no target token (loss_mask is 0 everywhere "
            "after the first token): there is nothing to train on; drop such batches"
        )
    for index, length in enumerate(batch.lengths):
        if not length:
            raise DataError(f"row {index} (uid {batch.uids[index]!r}) has no tokens; drop it")
        if length > limit.tokens:
            raise DataError(
                f"row {index} (uid {batch.uids[index]!r}) has {length} tokens, but "
                f"{limit.reason}; shorten the data"
            )
    for name in ("tokens", *FLOAT_COLUMNS):
        values_T = getattr(batch, name)
        if values_T is not None and len(values_T) != batch.num_tokens:
            raise DataError(
                f"{name} has {len(values_T)} entries for {batch.num_tokens} tokens; every column "
                "must have one entry per token"
            )
    if int(batch.tokens.min()) < 0 or int(batch.tokens.max()) >= vocab_size:
        _refuse_tokens(batch, vocab_size)


def _refuse_tokens(batch: TrainBatch, vocab_size: int) -> None:
    for index in range(len(batch)):
        tokens = batch.tokens[batch.slice_of(index)]
        first, last = int(tokens.min()), int(tokens.max())
        if first < 0 or last >= vocab_size:
            raise DataError(
                f"row {index} (uid {batch.uids[index]!r}) has token ids from {first} to {last}, "
                f"but the model's vocabulary is 0 .. {vocab_size - 1}; the data was made with "
                "another tokenizer"
            )
