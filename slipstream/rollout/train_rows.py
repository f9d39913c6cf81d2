"""From scored samples to rows that a trainer takes, and their advantages.

Called by the training loop and by `functional`'s users. Groups are cut by `Sample.group_index`,
never by position. Knows the estimators by name only, and nothing about generation or trainers.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.algorithms import (
    AdvantageConfig,
    adv_needs,
    get_adv_estimator_fn,
)
from slipstream.errors import ConfigError, DataError
from slipstream.training.columns import floats, integers, padded, train_batch, unpadded
from slipstream.types import RolloutBatch, Sample, Segment, TrainBatch, TrainRow


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStats:
    """How many groups of a batch can teach something.

    `zero_variance` groups, of two or more samples with equal rewards, have advantage 0;
    `singletons` have nothing to be compared with.
    """

    groups: int
    zero_variance: int
    singletons: int


def group_samples(samples: Sequence[Sample]) -> dict[int, list[Sample]]:
    """Samples by `group_index`, groups in order of appearance.

    Raises:
        DataError: a sample without `group_index`.
    """
    groups: dict[int, list[Sample]] = {}
    for key, sample in zip(_group_indices(samples), samples, strict=True):
        groups.setdefault(key, []).append(sample)
    return groups


def compute_advantages(
    rewards: Sequence[float],
    baseline: float = 0.0,
    *,
    groups: Sequence[Hashable] | None = None,
    adv_estimator: str = "grpo",
    norm_adv_by_std_in_grpo: bool = True,
) -> list[float]:
    """One advantage per reward.

    Without `groups`: reward - `baseline`. With `groups`, one key per reward: what the named
    estimator of `algorithms` makes of them; a baseline has no place there.

    Raises:
        ConfigError: an unknown estimator, or a baseline together with groups.
        DataError: lengths differ, or a reward is not finite.
    """
    if groups is None:
        return [reward - baseline for reward in rewards]
    if baseline:
        raise ConfigError(
            f"baseline={baseline} has no meaning for {adv_estimator!r}, which compares rewards "
            f"within groups; give groups or a baseline, not both"
        )
    batch = train_batch([TrainRow(tokens=[0, 0], loss_mask=[0.0, 1.0]) for _ in rewards])
    fill_advantages(
        batch,
        placed_rewards(batch, rewards),
        groups,
        adv_estimator=adv_estimator,
        config=AdvantageConfig(norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo),
    )
    assert batch.advantages is not None
    advantages: list[float] = batch.advantages[1::2].tolist()
    return advantages


def prepare_grpo_batch(
    samples: Sequence[Sample] | RolloutBatch,
    rewards: Sequence[float] | None = None,
    *,
    adv_estimator: str = "grpo",
    norm_adv_by_std_in_grpo: bool = True,
    baseline: float | None = None,
    temperature: float = 1.0,
) -> TrainBatch:
    """Training rows with group-relative advantages, one row per sample, in the samples' order.

    `rewards` default to the samples' own. Each reward stands on its sample's last target token; the
    estimator's advantages are aligned with tokens, 0 where the loss mask is 0. With `baseline` they
    are reward - `baseline` in place of the estimator's. `temperature` is the one that the rollout
    sampled at. Rows carry `rollout_log_probs` if the policy sampled every target token of the
    batch; otherwise none does. For the groups that teach nothing, see `group_stats`.

    Raises:
        ConfigError: an unknown estimator.
        DataError: no samples, a sample without `group_index`, another number of rewards than of
            samples, or a reward that is not finite.
    """
    samples = _samples_of(samples)
    # Given rewards replace the rewards of turns, too.
    turns = samples if rewards is None else ()
    if rewards is None:
        rewards = [sample.reward for sample in samples]
    batch = rows_of(samples, temperature=temperature)
    if baseline is None:
        fill_advantages(
            batch,
            placed_rewards(batch, rewards, turns),
            _group_indices(samples),
            adv_estimator=adv_estimator,
            config=AdvantageConfig(norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo),
        )
    else:
        fill_from_baseline(batch, rewards, baseline)
    return batch


def rows_of(
    samples: Sequence[Sample], *, temperature: float = 1.0, truncated: bool = False
) -> TrainBatch:
    """A batch without advantages, one row for each branch of a sample. This is where the lists of
    segments become tensors, once. With `truncated` the rollout's log-probs are
    those of the law that top-k, top-p and min-p left, which tokens were drawn from.

    `temperature` is the one that the rollout sampled at. Rows carry `rollout_log_probs` if the
    policy sampled every target token of the batch; otherwise none does.
    """
    rows = [branch for sample in samples for branch in sample.branches]
    segments = [segment for row in rows for segment in row.segments]
    several = len(rows) > len(samples)
    counts = [len(sample.branches) for sample in samples]
    batch = TrainBatch(
        starts=[0, *accumulate(row.num_tokens for row in rows)],
        sequences=[0, *accumulate(counts)] if several else None,
        tokens=integers(segment.ids for segment in segments),
        loss_mask=floats((segment.loss_mask for segment in segments), exact=True),
        uids=[row.uid for row in rows],
        keys=[None] * len(rows),
        temperature=temperature,
    )
    if not bool((batch.targets & ~_sampled(segments)).any()):
        batch.rollout_log_probs = floats(
            segment.sampling_log_probs if truncated else segment.log_probs for segment in segments
        )
    return batch


def _sampled(segments: Sequence[Segment]) -> Tensor:
    """(T,) bool: tokens of `segments` that a policy sampled."""
    sampled = torch.zeros(sum(len(segment.ids) for segment in segments), dtype=torch.bool)
    start = 0
    for segment in segments:
        for span in segment.spans:
            sampled[start + span.start : start + span.end] = span.version >= 0
        start += len(segment.ids)
    return sampled


def placed_rewards(
    batch: TrainBatch, rewards: Sequence[float], samples: Sequence[Sample] = ()
) -> Tensor:
    """Token-level rewards (T,) in float64: each sequence's reward on its last target token.

    With `samples`, one per sequence, `rewards` include the rewards of turns, which are placed at
    the last sampled token of their turn. An empty response still counts in its group's baseline,
    from a place that is masked. Raises DataError if the numbers of rewards and sequences differ,
    and for a reward that is not finite.
    """
    starts = batch.sequence_starts
    _check_rewards(rewards, len(starts) - 1)
    turns = [() if s.episode is None else s.episode.rewards for s in samples]
    if samples:
        pairs = zip(rewards, turns, strict=True)
        rewards = [reward - math.fsum(one.value for one in row) for reward, row in pairs]
    if 0 in batch.lengths:
        raise DataError(f"row {batch.lengths.index(0)} has no tokens, so its reward has no place")
    placed = torch.zeros(batch.num_tokens, dtype=torch.float64)
    ends = [end - 1 for end in starts[1:]]
    targets = _last_targets(batch)[ends]
    places = np.where(targets < 0, ends, targets)
    placed[torch.from_numpy(places)] = torch.tensor(rewards, dtype=torch.float64)
    first_rows = batch.sequences or range(len(batch))
    for first, row in zip(first_rows, turns, strict=False):
        for one in row:
            placed[batch.starts[first + one.branch] + one.place] += one.value
    return placed


def carried_rewards(batch: TrainBatch, rewards_T: Tensor) -> Tensor:
    """Token-level rewards after tokens were rejected: what stood on one that is no target now goes
    to the last target before it, so that returns of the others are what they were.

    Estimators that sum up what is to come skip masked places; a response whose end is rejected
    would else have earned nothing (in VERL it does). Where no target comes before it, it stays.
    """
    carried = rewards_T.numpy().copy()
    last = _last_targets(batch)
    left = np.flatnonzero((carried != 0) & ~batch.targets.numpy() & (last >= 0))
    # In order: sums of several rewards keep their bits.
    np.add.at(carried, last[left], carried[left])
    carried[left] = 0.0
    return torch.from_numpy(carried)


def _last_targets(batch: TrainBatch) -> NDArray[np.int64]:
    """(T,): the last target of the same sequence up to each token; -1 where none is."""
    starts = batch.sequence_starts
    places = np.arange(batch.num_tokens)
    last = np.maximum.accumulate(np.where(batch.targets.numpy(), places, -1))
    last[last < np.repeat(starts[:-1], np.diff(starts))] = -1
    return last


def fill_from_baseline(batch: TrainBatch, rewards: Sequence[float], baseline: float) -> None:
    """Advantages reward - `baseline` on all target tokens, in float64. Raises DataError as
    `placed_rewards`."""
    starts = batch.sequence_starts
    _check_rewards(rewards, len(starts) - 1)
    values = torch.tensor(compute_advantages(rewards, baseline), dtype=torch.float64)
    lengths = torch.tensor(starts).diff()
    batch.advantages = values.repeat_interleave(lengths) * batch.targets


def fill_advantages(
    batch: TrainBatch,
    rewards_T: Tensor,
    groups: Sequence[Hashable],
    *,
    adv_estimator: str,
    config: AdvantageConfig,
    extra: Mapping[str, object] | None = None,
) -> None:
    """Set `batch.advantages` and `batch.returns` to those of the named estimator; 0 on tokens that
    are no target.

    `rewards_T` are per token, `groups` one key for each sequence. What the estimator needs besides
    (`algorithms.adv_needs`) comes from the batch's columns or, where it is none, from `extra` by
    the name of the need: padded (N, W) tensors for columns, whatever the estimator takes else.

    Raises:
        ConfigError: an unknown estimator.
        DataError: numbers of rows differ, or the estimator refuses them, lacks something that it
            needs, or returns another shape.
    """
    starts = batch.sequence_starts
    if len(rewards_T) != batch.num_tokens or len(groups) != len(starts) - 1:
        raise DataError(
            f"got {len(rewards_T)} rewards for {batch.num_tokens} tokens and {len(groups)} keys "
            f"for {len(starts) - 1} rows"
        )
    try:
        estimator, needs = get_adv_estimator_fn(adv_estimator), adv_needs(adv_estimator)
    except ValueError as error:
        raise ConfigError(f"algorithm.adv_estimator: {error}") from error
    mask = padded(batch.targets, starts)
    given = dict(extra or {})
    for need in needs:
        if need.value in COLUMNS:
            column = getattr(batch, need.value)
            if column is not None:
                given[need.value] = padded(column, starts)
    try:
        advantages, returns = estimator(
            token_level_rewards=padded(rewards_T, starts),
            response_mask=mask,
            index=groups,
            config=config,
            **{need.value: given[need.value] for need in needs if need.value in given},
        )
    except ValueError as error:
        raise DataError(f"advantage estimator {adv_estimator!r}: {error}") from error
    if advantages.shape != mask.shape:
        raise DataError(
            f"advantage estimator {adv_estimator!r} returned shape {tuple(advantages.shape)} for "
            f"rewards of shape {tuple(mask.shape)}; it must return one value per token"
        )
    targets = batch.targets
    batch.advantages = torch.where(targets, unpadded(advantages, starts), 0.0)
    batch.returns = torch.where(targets, unpadded(returns, starts), 0.0)


COLUMNS = frozenset(("values", "old_log_probs", "ref_log_probs", "rollout_is_weights"))
"""Needs of estimators that batches have as columns."""


def group_stats(
    samples: Sequence[Sample] | RolloutBatch, rewards: Sequence[float] | None = None
) -> GroupStats:
    """Count groups, and those without a difference between rewards.

    Raises:
        DataError: as `prepare_grpo_batch`.
    """
    samples = _samples_of(samples)
    values = [sample.reward for sample in samples] if rewards is None else rewards
    _check_rewards(values, len(samples))
    by_group: dict[int, list[float]] = {}
    for key, value in zip(_group_indices(samples), values, strict=True):
        by_group.setdefault(key, []).append(value)
    several = [group for group in by_group.values() if len(group) > 1]
    return GroupStats(
        groups=len(by_group),
        zero_variance=sum(1 for group in several if len(set(group)) == 1),
        singletons=len(by_group) - len(several),
    )


def _samples_of(samples: Sequence[Sample] | RolloutBatch) -> Sequence[Sample]:
    chosen = samples.samples if isinstance(samples, RolloutBatch) else samples
    if not chosen:
        raise DataError("a training batch needs at least one sample, got none")
    return chosen


def _group_indices(samples: Sequence[Sample]) -> list[int]:
    indices: list[int] = []
    for position, sample in enumerate(samples):
        if sample.group_index is None:
            raise DataError(
                f"sample {position} (uid {sample.uid!r}) has no group_index; groups are cut by it, "
                f"so set it to the same number on all samples of one prompt"
            )
        indices.append(sample.group_index)
    return indices


def _check_rewards(rewards: Sequence[float], count: int) -> None:
    if len(rewards) != count:
        raise DataError(f"one reward per sample is needed: got {len(rewards)} for {count} samples")
    for position, reward in enumerate(rewards):
        if not math.isfinite(reward):
            raise DataError(
                f"reward {position} is {reward}; it would spoil its whole group, so drop the sample"
            )
