"""Steps between scored groups and the trainer: usable samples, KL penalty in the reward,
mini-batches and batch metrics.

Pure functions of groups and batches, and the state of the KL controller. This module does not call
backends or engines. Called by `loops.learner` and `loops.rl`.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from slipstream.algorithms import (
    AdaptiveKLController,
    KLController,
    apply_kl_penalty,
    subtract_kl,
)
from slipstream.algorithms.full_kl import KLDirection
from slipstream.checkpoint.saved import Saved
from slipstream.errors import DataError
from slipstream.metrics.batch_metrics import summary
from slipstream.rewards.protocol import REWARD_FAILURE
from slipstream.training.columns import padded, select_rows, unpadded
from slipstream.training.losses import FULL_KL
from slipstream.types import Group, Sample, Status, TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Usable:
    """The samples to train on.

    `groups`: samples by group, without empty groups. `lone`: number of samples that have a score
    but cannot be compared, because all other samples of their group or its greedy response failed.
    `baselines`: rewards of the greedy responses by group, if there are any.
    """

    groups: list[list[Sample]]
    lone: int
    baselines: list[float] = field(default_factory=list)

    @property
    def samples(self) -> list[Sample]:
        """All usable samples, in the order of their groups."""
        return [sample for group in self.groups for sample in group]


def usable_samples(
    groups: Sequence[Group], *, compared: bool = True, greedy: bool = False
) -> Usable:
    """Select the samples to train on.

    Failed samples are left out. With `compared`, advantages compare the samples of a group, so a
    sample is left out if all others of its group failed. With `greedy`, samples are compared with
    the group's greedy response, so a group is left out if that response failed. Raises DataError
    if `greedy` is set and a group has no greedy response.
    """
    kept: list[list[Sample]] = []
    baselines: list[float] = []
    lone = 0
    for group in groups:
        scored = [s for s in group.samples if s.status is not Status.FAILED]
        if greedy and group.greedy is None:
            raise DataError(
                "the advantage estimator needs reward_baselines (rewards of greedy responses), but "
                "the rollout generated none; set RolloutSettings(greedy_baseline=True)"
            )
        no_baseline = greedy and group.greedy is not None and group.greedy.status is Status.FAILED
        if no_baseline or (compared and len(scored) == 1 and len(group.samples) > 1):
            lone += len(scored)
        elif scored:
            kept.append(scored)
            if group.greedy is not None:
                baselines.append(group.greedy.reward)
    return Usable(groups=kept, lone=lone, baselines=baselines)


def first_failure(groups: Sequence[Group]) -> str:
    """A message with the reason of the first failed sample; says so if no sample failed."""
    for group in groups:
        for sample in group.members:
            if sample.status is Status.FAILED:
                return f"sample {sample.uid}: {sample.failure or 'no reason given'}"
    return "no sample failed"


def failure_of(sample: Sample) -> str | None:
    """A message with the failure of a sample and its consequence; None if it did not fail."""
    if sample.status is Status.FAILED:
        return f"left out, {sample.failure or 'no reason given'}"
    reason = sample.metadata.get(REWARD_FAILURE)
    return None if reason is None else f"reward 0, because the reward function failed: {reason}"


class KLInReward:
    """The KL penalty of `algorithm.use_kl_in_reward`, with the state of its controller.

    `direction`: the direction of the KL over the full vocabulary. None if the penalty estimates the
    KL from the log-probs of the sampled tokens.
    """

    def __init__(self, controller: KLController, kind: str) -> None:
        """`kind` is a value of `algorithm.kl_penalty`."""
        self._controller = controller
        self._kind = kind
        self.direction: KLDirection | None = FULL_KL.get(kind)

    def rewards(
        self,
        rewards_T: Tensor,
        batch: TrainBatch,
        full_kl_T: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """Token-level rewards (T,) minus the penalty of each token, in float64, and metrics.

        Updates the coefficient of an adaptive controller. With a `direction` it needs `full_kl_T`,
        the KL at each token; else the batch needs old and reference log-probs.
        """
        starts = batch.sequence_starts
        scores, mask = padded(rewards_T, starts), padded(batch.targets, starts)
        if self.direction is not None:
            assert full_kl_T is not None
            penalized, metrics = subtract_kl(
                scores, padded(full_kl_T, starts), mask, kl_ctrl=self._controller
            )
        else:
            assert batch.old_log_probs is not None
            assert batch.ref_log_probs is not None
            penalized, metrics = apply_kl_penalty(
                scores,
                padded(batch.old_log_probs, starts),
                padded(batch.ref_log_probs, starts),
                mask,
                kl_ctrl=self._controller,
                kl_penalty_kind=self._kind,
            )
        return unpadded(penalized, starts).double(), metrics

    def state_dict(self) -> dict[str, Any]:
        """The coefficient, for checkpoints."""
        return {"kl_coef": self._controller.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the coefficient of an adaptive controller."""
        value = Saved(state).fields("kl_coef")["kl_coef"].number(0.0)
        # The coefficient of a fixed controller comes from this run's configuration.
        if isinstance(self._controller, AdaptiveKLController):
            self._controller.value = value


def mini_batches(
    batch: TrainBatch, group_sizes: Sequence[int], prompts: int | None, *, shuffle: str | None
) -> list[TrainBatch]:
    """Split a batch into mini-batches of `prompts` groups each; None keeps the batch whole.

    `group_sizes` is the number of rows of each group, in order. Rows of a group stay together.
    `shuffle` is a seed for a random order of the groups; None keeps their order.
    """
    groups: list[range] = []
    start = 0
    for size in group_sizes:
        groups.append(range(start, start + size))
        start += size
    if shuffle is not None:
        random.Random(shuffle).shuffle(groups)
    width = prompts or len(groups)
    return [
        select_rows(batch, [row for group in groups[first : first + width] for row in group])
        for first in range(0, len(groups), width)
    ]


def batch_metrics(
    batch: TrainBatch,
    rewards: Sequence[float],
    usable: Usable,
    weight_version: int,
    *,
    critic: bool = False,
) -> dict[str, float]:
    """Metrics of a batch: mean, maximum and minimum of rewards after penalties and of advantages;
    with `critic` also of returns and values; and the staleness of the trained tokens, in weight
    versions before `weight_version`."""
    metrics = summary("critic/rewards", rewards)
    targets = batch.targets
    columns = ("advantages", "returns", "values") if critic else ("advantages",)
    for name in columns:
        column = getattr(batch, name)
        if column is None:
            column = torch.zeros(batch.num_tokens)
        metrics |= _summary_of(f"critic/{name}", column[targets])
    ages = _ages(usable.samples, weight_version)
    if ages:
        metrics["rollout/staleness/mean"] = (
            sum(age * count for age, count in ages.items()) / ages.total()
        )
        metrics["rollout/staleness/max"] = float(max(ages))
    return metrics


def _ages(samples: Sequence[Sample], weight_version: int) -> Counter[int]:
    """Number of trained tokens by staleness (weight versions since they were sampled)."""
    ages = Counter[int]()
    for branch in (branch for sample in samples for branch in sample.branches):
        for segment in branch.segments:
            for span in segment.spans:
                trained = sum(map(bool, segment.loss_mask[span.start : span.end]))
                if trained and span.version >= 0:
                    ages[weight_version - span.version] += trained
    return ages


def _summary_of(prefix: str, values_T: Tensor) -> dict[str, float]:
    """`metrics.batch_metrics.summary` of a column, to the same bits, but without a list of all
    values in memory."""
    if not len(values_T):
        return {}
    parts = (values_T[start : start + 4096].tolist() for start in range(0, len(values_T), 4096))
    return {
        f"{prefix}/mean": math.fsum(itertools.chain.from_iterable(parts)) / len(values_T),
        f"{prefix}/max": float(values_T.max()),
        f"{prefix}/min": float(values_T.min()),
    }
