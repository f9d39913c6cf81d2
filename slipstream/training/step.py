"""Forward passes over the micro-batches of a mini-batch, and the inputs of loss functions.

Backends call this on their compute thread. It knows policies, packing and losses, but no
optimizers, threads or versions. The LM head is applied only to hidden states that predict target
tokens, a chunk at a time, so memory for logits does not grow with the batch.

Shapes: B rows, T padded length, N target tokens of a micro-batch, D hidden width.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.algorithms.aggregation import Normalizers
from slipstream.algorithms.correction import KeptIds, log_probs_on_support, support_log_mass
from slipstream.algorithms.full_kl import KLDirection, chunked_full_kl
from slipstream.algorithms.log_probs import (
    DEFAULT_KEEP_BYTES,
    chunked_sum_pi_squared,
    chunked_token_log_probs,
    log_softmax_rows,
)
from slipstream.errors import ConfigError
from slipstream.models.decoder import HiddenStates
from slipstream.models.numerics import ROW_MULTIPLE
from slipstream.models.policy import PackedPolicy
from slipstream.sampling.truncate import truncate
from slipstream.training.columns import any_of_rows, rows_of_column
from slipstream.training.losses import LossInputs
from slipstream.training.packing import (
    MicroBatch,
    build_micro_batch,
    column,
    plan_micro_batches,
    plan_sequences,
    prompt_groups,
    sequence_of,
)
from slipstream.types import Features, FeatureSink, SamplingParams, TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardSettings:
    """Limits of forward passes.

    `max_tokens_per_micro_batch` includes padding. It or `max_rows_per_micro_batch` may be None, but
    not both. `log_prob_chunk` is the number of tokens whose logits are in memory at once.
    `log_prob_keep_bytes` limits the logits kept for the backward pass, which recomputes the others.
    `gradient_checkpointing` recomputes each layer in the backward pass, with bitwise equal
    gradients. Raises ConfigError for impossible values.
    """

    max_tokens_per_micro_batch: int | None
    max_rows_per_micro_batch: int | None = None
    log_prob_chunk: int = 512
    log_prob_keep_bytes: int = DEFAULT_KEEP_BYTES
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        for name in ("max_tokens_per_micro_batch", "max_rows_per_micro_batch"):
            limit = getattr(self, name)
            if limit is not None and limit < 1:
                raise ConfigError(f"{name}={limit} must be at least 1, or null for no limit")
        if self.max_tokens_per_micro_batch is None and self.max_rows_per_micro_batch is None:
            raise ConfigError(
                "max_tokens_per_micro_batch and max_rows_per_micro_batch are both null; set one of "
                "them to limit the size of a forward pass"
            )
        if self.log_prob_keep_bytes < 0:
            raise ConfigError(
                f"log_prob_keep_bytes={self.log_prob_keep_bytes} is negative; set at least 0"
            )
        if self.log_prob_chunk < 1 or self.log_prob_chunk % ROW_MULTIPLE:
            raise ConfigError(
                f"log_prob_chunk={self.log_prob_chunk} must be a positive multiple of "
                f"{ROW_MULTIPLE}, because exact mode computes rows in groups of {ROW_MULTIPLE}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardResult:
    """Results of a forward pass: `log_probs`, `entropies` and, with a reference, `full_kl`, each
    (N,), for the target tokens of `micro` in order of their slots; and the hidden states."""

    micro: MicroBatch
    log_probs: Tensor
    entropies: Tensor
    hidden: HiddenStates
    full_kl: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FullKL:
    """The packed reference policy for the KL over the full vocabulary, and the KL's direction."""

    reference: PackedPolicy
    direction: KLDirection


def wanted_rows(batch: TrainBatch, also: Iterable[int] = ()) -> dict[int, int]:
    """Index -> length of the rows with target tokens and of the rows `also`."""
    trained = any_of_rows(batch.targets, batch.starts)
    wanted = {i for i, has_targets in enumerate(trained) if has_targets} | set(also)
    lengths = batch.lengths
    return {i: lengths[i] for i in wanted}


def micro_batches(
    batch: TrainBatch,
    *,
    also: Iterable[int],
    settings: ForwardSettings,
    pad_id: int,
    max_positions: int,
    device: torch.device,
    padded: bool,
    share_prompts: bool = False,
) -> Iterator[MicroBatch]:
    """Yield micro-batches of the rows with target tokens and of the rows `also`.

    With `share_prompts`, which needs `padded` to be false, rows of a micro-batch share their
    prompts.
    """
    lengths = wanted_rows(batch, also)
    groups = None
    # Rows of a sequence do not have the same prompt.
    if share_prompts and batch.sequences is None:
        groups = prompt_groups(batch, sorted(lengths))
    for indices in plan_rows(batch, lengths, settings, padded=padded, groups=groups):
        yield build_micro_batch(
            batch,
            indices,
            pad_id=pad_id,
            max_positions=max_positions,
            device=device,
            padded=padded,
            groups=groups,
        )


def plan_rows(
    batch: TrainBatch,
    lengths: Mapping[int, int],
    settings: ForwardSettings,
    *,
    padded: bool,
    groups: Mapping[int, int] | None = None,
) -> list[list[int]]:
    """Plan micro-batches for rows, given as index -> length, within the limits of `settings`. The
    rows of a sequence stay together."""
    if batch.sequences is not None:
        return plan_sequences(
            lengths,
            dict(enumerate(sequence_of(batch))),
            max_tokens=settings.max_tokens_per_micro_batch,
            max_rows=settings.max_rows_per_micro_batch,
            padded=padded,
        )
    return plan_micro_batches(
        lengths,
        max_tokens=settings.max_tokens_per_micro_batch,
        max_rows=settings.max_rows_per_micro_batch,
        padded=padded,
        groups=groups,
    )


def forward(
    packed: PackedPolicy,
    micro: MicroBatch,
    *,
    temperature: float,
    settings: ForwardSettings,
    aux_layers: tuple[int, ...] = (),
    full_kl: FullKL | None = None,
    kept: KeptIds | None = None,
) -> ForwardResult:
    """Compute log-probs and entropies of the target tokens, and their KL to a reference.

    The results are differentiable if `packed` is. With `kept`, token ids for each of
    `micro.head_rows`, log-probs are renormalized over these ids; entropies and KL always cover the
    full vocabulary.
    """
    # Only `PackedDecoder` has this argument.
    sharing: dict[str, Any] = {} if micro.shared is None else {"shared": micro.shared}
    hidden = packed.forward(
        micro.ids,
        micro.positions,
        lengths=micro.lengths,
        aux_layers=aux_layers,
        recompute=settings.gradient_checkpointing and torch.is_grad_enabled(),
        **sharing,
    )
    rows = _head_rows(hidden, micro)
    weight, product = packed.head
    log_probs, entropies = chunked_token_log_probs(
        rows,
        weight,
        micro.labels,
        temperature,
        chunk_size=settings.log_prob_chunk,
        keep_bytes=settings.log_prob_keep_bytes,
        product=product,
    )
    if kept is not None:
        mass = support_log_mass(
            rows,
            weight,
            kept,
            temperature,
            chunk_size=settings.log_prob_chunk,
            product=product,
        )
        log_probs = log_probs_on_support(log_probs, mass)
    targets = len(micro.target_slots)
    kl = None
    if full_kl is not None:
        kl = _whole_kl(packed, micro, rows, full_kl, temperature, settings)[:targets]
    return ForwardResult(
        micro=micro,
        log_probs=log_probs[:targets],
        entropies=entropies[:targets],
        hidden=hidden,
        full_kl=kl,
    )


@torch.no_grad()
def whole_kl(
    packed: PackedPolicy,
    micro: MicroBatch,
    full_kl: FullKL,
    *,
    temperature: float,
    settings: ForwardSettings,
) -> Tensor:
    """The KL to the reference over the full vocabulary at the target tokens (B, T), 0
    elsewhere."""
    hidden = packed.forward(micro.ids, micro.positions, lengths=micro.lengths)
    kl = _whole_kl(packed, micro, _head_rows(hidden, micro), full_kl, temperature, settings)
    return micro.scatter(kl[: len(micro.target_slots)])


def _whole_kl(
    packed: PackedPolicy,
    micro: MicroBatch,
    rows: Tensor,
    full_kl: FullKL,
    temperature: float,
    settings: ForwardSettings,
) -> Tensor:
    """The KL (M,) to the reference. `rows` are the policy's hidden states at
    `micro.head_rows`."""
    reference = full_kl.reference
    with torch.no_grad():
        theirs = reference.forward(micro.ids, micro.positions, lengths=micro.lengths)
    weight, product = packed.head
    ref_weight, ref_product = reference.head
    return chunked_full_kl(
        rows,
        weight,
        _head_rows(theirs, micro),
        ref_weight,
        temperature,
        chunk_size=settings.log_prob_chunk,
        direction=full_kl.direction,
        product=product,
        ref_product=ref_product,
    )


@torch.no_grad()
def sum_pi_squared(
    packed: PackedPolicy, micro: MicroBatch, *, temperature: float, settings: ForwardSettings
) -> Tensor:
    """The sum of squared probabilities over the vocabulary at the target tokens (B, T), 0
    elsewhere."""
    hidden = packed.forward(micro.ids, micro.positions, lengths=micro.lengths)
    weight, product = packed.head
    sums = chunked_sum_pi_squared(
        _head_rows(hidden, micro),
        weight,
        temperature,
        chunk_size=settings.log_prob_chunk,
        product=product,
    )
    return micro.scatter(sums[: len(micro.target_slots)])


@torch.no_grad()
def kept_of_sampler(
    packed: PackedPolicy,
    micro: MicroBatch,
    *,
    temperature: float,
    cuts: SamplingParams,
    settings: ForwardSettings,
) -> list[array[int]]:
    """The token ids that top-k, top-p and min-p of `cuts` keep at each target token
    (`sampling.truncate`)."""
    rows = _head_rows(packed.forward(micro.ids, micro.positions, lengths=micro.lengths), micro)
    weight, product = packed.head
    kept: list[array[int]] = []
    for start in range(0, len(rows), settings.log_prob_chunk):
        part = rows[start : start + settings.log_prob_chunk]
        log_p = log_softmax_rows(part, weight, temperature, product)
        count = len(log_p)
        support = truncate(
            log_p,
            torch.full((count,), cuts.top_k, device=log_p.device),
            torch.full((count,), cuts.top_p, dtype=torch.float64, device=log_p.device),
            torch.full((count,), cuts.min_p, dtype=torch.float64, device=log_p.device),
        )
        ids = support.nonzero()[:, 1].cpu().numpy().astype(np.int32)
        ends = support.sum(dim=-1).cumsum(0).tolist()
        kept += [array("i", ids[a:b].tobytes()) for a, b in itertools.pairwise([0, *ends])]
    return kept[: len(micro.target_slots)]


def kept_ids(batch: TrainBatch, micro: MicroBatch) -> KeptIds | None:
    """The recorded `kept_ids` for each of `micro.head_rows`; None if the batch has none."""
    if batch.kept_ids is None:
        return None
    rows = [batch.kept_ids[i] for i in micro.indices]
    width = micro.mask.shape[1]
    kept = [rows[slot // width][slot % width] for slot in micro.target_slots.tolist()]
    filled = [*kept, *[()] * (len(micro.head_rows) - len(kept))]
    return KeptIds.of(filled, micro.ids.device)


def _head_rows(hidden: HiddenStates, micro: MicroBatch) -> Tensor:
    """The hidden states that predict target tokens."""
    return hidden.final.flatten(0, 1).index_select(0, micro.head_rows)


def batch_normalizers(batch: TrainBatch) -> Normalizers:
    """Normalizers of the whole mini-batch. The horizon is the length of its longest sequence."""
    starts = batch.sequence_starts
    weights = [row[1:] for row in rows_of_column(batch.loss_mask, batch.starts)]
    return Normalizers(
        # In order and in float64: another order would change the last bits of weighted sums.
        num_tokens=float(sum(sum(row.tolist()) for row in weights)),
        num_sequences=float(sum(any_of_rows(batch.targets, starts))),
        horizon=float(max(end - start for start, end in itertools.pairwise(starts))),
    )


def loss_inputs(batch: TrainBatch, result: ForwardResult, normalizers: Normalizers) -> LossInputs:
    """The inputs of a loss function for one micro-batch, all (B, T), with a row for each
    sequence."""
    micro = result.micro
    log_probs = micro.scatter(result.log_probs)
    targets = micro.mask != 0

    def aligned(values_T: Tensor | None) -> Tensor | None:
        spread = column(values_T, batch, micro.indices, log_probs)
        return None if spread is None else torch.where(targets, spread, 0)

    old = aligned(batch.old_log_probs)
    if old is None:
        old = log_probs.detach()
    elif batch.has_old_log_probs is not None:
        given = batch.has_old_log_probs[micro.indices].to(log_probs.device)
        old = torch.where(given[:, None], old, log_probs.detach())
    selected = aligned(batch.selected)
    inputs = LossInputs(
        log_probs=log_probs,
        entropy=micro.scatter(result.entropies),
        mask=micro.mask.to(log_probs.dtype),
        old_log_probs=old,
        normalizers=normalizers,
        num_targets=batch.num_target_tokens,
        advantages=aligned(batch.advantages),
        ref_log_probs=aligned(batch.ref_log_probs),
        rollout_log_probs=aligned(batch.rollout_log_probs),
        rollout_is_weights=aligned(batch.rollout_is_weights),
        selected=None if selected is None else selected != 0,
        full_kl=None if result.full_kl is None else micro.scatter(result.full_kl),
    )
    if micro.layout is None:
        return inputs
    columns = {f.name: getattr(inputs, f.name) for f in fields(inputs)}
    laid: dict[str, Any] = {
        name: micro.layout.apply(value)
        for name, value in columns.items()
        if isinstance(value, Tensor)
    }
    return replace(inputs, **laid)


def hand_over(
    sink: FeatureSink,
    batch: TrainBatch,
    result: ForwardResult,
    *,
    selected: set[int],
    optimizer_step: int,
) -> None:
    """Pass the features of the selected rows to `sink`, as detached copies without padding."""
    final, aux_layers = result.hidden.final.detach().flatten(0, 1), result.hidden.aux_layers
    for start, index in zip(result.micro.starts, result.micro.indices, strict=True):
        if index not in selected:
            continue
        place = batch.slice_of(index)
        own = slice(start, start + place.stop - place.start)
        # Copy, because a view would keep the whole micro-batch in memory.
        sink.receive(
            Features(
                uid=batch.uids[index],
                tokens=batch.tokens[place].tolist(),
                loss_mask=batch.loss_mask[place].tolist(),
                hidden=final[own].clone(),
                aux_layers=None if aux_layers is None else aux_layers.flatten(0, 1)[own].clone(),
                optimizer_step=optimizer_step,
                key=batch.keys[index],
            )
        )


class MetricSums:
    """Accumulates the metrics of micro-batches into those of a mini-batch."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._maxima: dict[str, float] = {}

    def add(self, sums: Mapping[str, Tensor | float], maxima: Mapping[str, Tensor | float]) -> None:
        """Add a micro-batch: sums are added, of `maxima` the largest value is kept."""
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + float(value)
        for name, value in maxima.items():
            known = self._maxima.get(name, float("-inf"))
            self._maxima[name] = max(known, float(value))

    def join(self, other: MetricSums) -> None:
        """Add the metrics of other micro-batches of the same mini-batch."""
        self.add(other._sums, other._maxima)

    def values(self) -> dict[str, float]:
        """The metrics of the mini-batch."""
        return {**self._sums, **self._maxima}
