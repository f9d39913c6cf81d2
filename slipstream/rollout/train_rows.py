"""From scored samples to rows that a trainer takes, and their advantages.

Called by the training loop and by `functional`'s users. Groups are cut by `Sample.group_index`,
never by position. Knows the estimators by name only, and nothing about generation or trainers.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.algorithms import (
    AdvantageConfig,
    adv_needs,
    get_adv_estimator_fn,
)
from slipstream.errors import ConfigError, DataError
from slipstream.types import RolloutBatch, Sample, TrainBatch, TrainRow


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
    rows = [TrainRow(tokens=[0, 0], loss_mask=[0.0, 1.0]) for _ in rewards]
    fill_advantages(
        rows,
        placed_rewards(rows, rewards),
        groups,
        adv_estimator=adv_estimator,
        config=AdvantageConfig(norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo),
    )
    return [(row.advantages or [])[1] for row in rows]


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
    if rewards is None:
        rewards = [sample.reward for sample in samples]
    batch = rows_of(samples, temperature=temperature)
    if baseline is None:
        fill_advantages(
            batch.rows,
            placed_rewards(batch.rows, rewards),
            _group_indices(samples),
            adv_estimator=adv_estimator,
            config=AdvantageConfig(norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo),
        )
    else:
        fill_from_baseline(batch.rows, rewards, baseline)
    return batch


def rows_of(
    samples: Sequence[Sample], *, temperature: float = 1.0, truncated: bool = False
) -> TrainBatch:
    """Rows without advantages, one for each sample. With `truncated` the rollout's log-probs are
    those of the law that top-k, top-p and min-p left, which tokens were drawn from.

    `temperature` is the one that the rollout sampled at. Rows carry `rollout_log_probs` if the
    policy sampled every target token of the batch; otherwise none does.
    """
    sampled = all(
        version >= 0
        for sample in samples
        for version, target in zip(sample.versions, targets_of(sample.loss_mask), strict=True)
        if target
    )

    def recorded(sample: Sample) -> list[float]:
        return sample.sampling_log_probs if truncated else sample.rollout_log_probs

    rows = [
        TrainRow(
            tokens=sample.tokens,
            loss_mask=sample.loss_mask,
            rollout_log_probs=recorded(sample) if sampled else None,
            uid=sample.uid,
        )
        for sample in samples
    ]
    return TrainBatch(rows=rows, temperature=temperature)


def placed_rewards(rows: Sequence[TrainRow], rewards: Sequence[float]) -> list[list[float]]:
    """Token-level rewards: each row's on its last target token.

    An empty response still counts in its group's baseline, from a place that is masked. Raises
    DataError for another number of rewards than of rows, or a reward that is not finite.
    """
    _check_rewards(rewards, len(rows))
    placed = []
    for row, reward in zip(rows, rewards, strict=True):
        targets = [t for t, target in enumerate(targets_of(row.loss_mask)) if target]
        out = [0.0] * len(row.tokens)
        out[targets[-1] if targets else len(out) - 1] = reward
        placed.append(out)
    return placed


def carried_rewards(
    rows: Sequence[TrainRow], rewards: Sequence[Sequence[float]]
) -> list[list[float]]:
    """Token-level rewards after tokens were rejected: what stood on one that is no target now goes
    to the last target before it, so that returns of the others are what they were.

    Estimators that sum up what is to come skip masked places; a response whose end is rejected
    would else have earned nothing (in VERL it does). Where no target comes before it, it stays.
    """
    carried = []
    for row, own in zip(rows, rewards, strict=True):
        out, last = list(own), None
        for t, target in enumerate(targets_of(row.loss_mask)):
            if target:
                last = t
            elif last is not None and out[t]:
                out[last], out[t] = out[last] + out[t], 0.0
        carried.append(out)
    return carried


def fill_from_baseline(rows: Sequence[TrainRow], rewards: Sequence[float], baseline: float) -> None:
    """Advantages reward - `baseline` on all target tokens. Raises DataError as `placed_rewards`."""
    _check_rewards(rewards, len(rows))
    values = compute_advantages(rewards, baseline)
    for row, value in zip(rows, values, strict=True):
        row.advantages = [value * target for target in targets_of(row.loss_mask)]


def fill_advantages(
    rows: Sequence[TrainRow],
    rewards: Sequence[Sequence[float]],
    groups: Sequence[Hashable],
    *,
    adv_estimator: str,
    config: AdvantageConfig,
    extra: Mapping[str, object] | None = None,
) -> None:
    """Advantages of the named estimator, and its returns, in place; 0 on tokens that are no target.

    `rewards` are per token, `groups` one key for each row. What the estimator needs besides
    (`algorithms.adv_needs`) comes from the rows' columns or, where it is none, from `extra` by the
    name of the need: padded (B, T) tensors for columns, whatever the estimator takes else.

    Raises:
        ConfigError: an unknown estimator.
        DataError: numbers of rows differ, or the estimator refuses them, lacks something that it
            needs, or returns another shape.
    """
    if not len(rows) == len(rewards) == len(groups):
        raise DataError(f"got {len(rewards)} rewards and {len(groups)} keys for {len(rows)} rows")
    try:
        estimator, needs = get_adv_estimator_fn(adv_estimator), adv_needs(adv_estimator)
    except ValueError as error:
        raise ConfigError(f"algorithm.adv_estimator: {error}") from error
    mask = padded([targets_of(row.loss_mask) for row in rows])
    given = dict(extra or {})
    for need in needs:
        if need.value in COLUMNS:
            columns = [getattr(row, need.value) for row in rows]
            if all(column is not None for column in columns):
                given[need.value] = padded(columns)
    try:
        advantages, returns = estimator(
            token_level_rewards=padded(rewards),
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
    for row, own, their in zip(
        rows, _masked(advantages, mask), _masked(returns, mask), strict=True
    ):
        row.advantages = own[: len(row.tokens)]
        row.returns = their[: len(row.tokens)]


COLUMNS = frozenset(("values", "old_log_probs", "ref_log_probs", "rollout_is_weights"))
"""Needs of estimators that rows have as columns."""


def padded(rows: Sequence[Sequence[float]]) -> Tensor:
    """(B, T) float32, zeros behind the end of each row."""
    out = torch.zeros(len(rows), max([1, *(len(row) for row in rows)]))
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.tensor(row)
    return out


def _masked(values: Tensor, mask: Tensor) -> list[list[float]]:
    out: list[list[float]] = torch.where(mask != 0, values, 0.0).tolist()
    return out


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


def targets_of(loss_mask: Sequence[float]) -> list[float]:
    """1.0 on targets: a weighted mask must not weigh the advantage as well, and the first token of
    a row is never a target."""
    return [1.0 if t and m else 0.0 for t, m in enumerate(loss_mask)]


def _check_rewards(rewards: Sequence[float], count: int) -> None:
    if len(rewards) != count:
        raise DataError(f"one reward per sample is needed: got {len(rewards)} for {count} samples")
    for position, reward in enumerate(rewards):
        if not math.isfinite(reward):
            raise DataError(
                f"reward {position} is {reward}; it would spoil its whole group, so drop the sample"
            )
