"""From scored samples to rows that a trainer takes: group-relative advantages.

Called by the training loop and by `functional`'s users. Groups are cut by `Sample.group_index`,
never by position. Knows the estimators by name only, and nothing about generation or trainers.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from slipstream.algorithms import AdvantageConfig, get_adv_estimator_fn
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
    rows = _token_advantages(
        rewards,
        [[1.0]] * len(rewards),
        groups,
        adv_estimator,
        AdvantageConfig(norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo),
    )
    return [row[0] for row in rows]


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
    masks = [_target_mask(sample) for sample in samples]
    if rewards is None:
        rewards = [sample.reward for sample in samples]
    if baseline is None:
        advantages = _token_advantages(
            rewards,
            masks,
            _group_indices(samples),
            adv_estimator,
            AdvantageConfig(norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo),
        )
    else:
        _check_rewards(rewards, len(samples))
        values = compute_advantages(rewards, baseline)
        advantages = [[value * m for m in mask] for value, mask in zip(values, masks, strict=True)]
    sampled = all(
        version >= 0
        for sample, mask in zip(samples, masks, strict=True)
        for version, target in zip(sample.versions, mask, strict=True)
        if target
    )
    rows = [
        TrainRow(
            tokens=sample.tokens,
            loss_mask=sample.loss_mask,
            advantages=row_advantages,
            rollout_log_probs=sample.rollout_log_probs if sampled else None,
            uid=sample.uid,
        )
        for sample, row_advantages in zip(samples, advantages, strict=True)
    ]
    return TrainBatch(rows=rows, temperature=temperature)


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


def _target_mask(sample: Sample) -> list[float]:
    """1.0 on targets: a weighted mask must not weigh the advantage as well, and the first token of
    a row is never a target."""
    return [1.0 if t and m else 0.0 for t, m in enumerate(sample.loss_mask)]


def _check_rewards(rewards: Sequence[float], count: int) -> None:
    if len(rewards) != count:
        raise DataError(f"one reward per sample is needed: got {len(rewards)} for {count} samples")
    for position, reward in enumerate(rewards):
        if not math.isfinite(reward):
            raise DataError(
                f"reward {position} is {reward}; it would spoil its whole group, so drop the sample"
            )


def _token_advantages(
    rewards: Sequence[float],
    masks: Sequence[Sequence[float]],
    groups: Sequence[Hashable],
    adv_estimator: str,
    config: AdvantageConfig,
) -> list[list[float]]:
    """Ragged rows of advantages, aligned with `masks`."""
    _check_rewards(rewards, len(masks))
    if len(groups) != len(masks):
        raise DataError(f"got {len(groups)} group keys for {len(masks)} rewards")
    try:
        estimator = get_adv_estimator_fn(adv_estimator)
    except ValueError as error:
        raise ConfigError(f"algorithm.adv_estimator: {error}") from error

    width = max([1, *(len(mask) for mask in masks)])
    mask_BT = torch.zeros(len(masks), width)
    rewards_BT = torch.zeros(len(masks), width)
    for b, (reward, mask) in enumerate(zip(rewards, masks, strict=True)):
        mask_BT[b, : len(mask)] = torch.tensor(mask)
        targets = [t for t, m in enumerate(mask) if m]
        # An empty response still counts in its group's baseline, from a place that is masked.
        rewards_BT[b, targets[-1] if targets else len(mask) - 1] = reward
    advantages, _ = estimator(
        token_level_rewards=rewards_BT, response_mask=mask_BT, index=groups, config=config
    )
    if advantages.shape != mask_BT.shape:
        raise DataError(
            f"advantage estimator {adv_estimator!r} returned shape {tuple(advantages.shape)} for "
            f"rewards of shape {tuple(mask_BT.shape)}; it must return one value per token"
        )
    rows: list[list[float]] = torch.where(mask_BT != 0, advantages, 0.0).tolist()
    return [row[: len(mask)] for row, mask in zip(rows, masks, strict=True)]
