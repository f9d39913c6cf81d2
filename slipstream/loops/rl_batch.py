"""From scored groups to what the trainer takes: rows, advantages, log-probs, mini-batches.

Knows groups and a backend to ask for log-probs; nothing of engines or of the course of a run.
Called by `loops.learner`.
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
from slipstream.errors import DataError
from slipstream.metrics.batch_metrics import summary
from slipstream.rewards.protocol import REWARD_FAILURE
from slipstream.training.columns import padded, select_rows, unpadded
from slipstream.training.losses import FULL_KL
from slipstream.types import Group, Sample, Status, TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Usable:
    """The samples to train on, group by group (none of them empty), and those left out although
    they have a score: every other sample of their group failed, or the greedy one that they are to
    be compared with. `baselines`: the reward of each group's greedy response, where wanted."""

    groups: list[list[Sample]]
    lone: int
    baselines: list[float] = field(default_factory=list)

    @property
    def samples(self) -> list[Sample]:
        return [sample for group in self.groups for sample in group]


def usable_samples(
    groups: Sequence[Group], *, compared: bool = True, greedy: bool = False
) -> Usable:
    """Leave out failed samples, and a sample whose advantage has nothing to be relative to: where
    advantages are `compared` within groups another sample, with `greedy` the group's greedy one."""
    kept: list[list[Sample]] = []
    baselines: list[float] = []
    lone = 0
    for group in groups:
        scored = [s for s in group.samples if s.status is not Status.FAILED]
        if greedy and group.greedy is None:
            raise DataError(
                "the advantage estimator needs reward_baselines, the rewards of greedy responses, "
                "and the rollout makes none; set RolloutSettings(greedy_baseline=True)"
            )
        without = greedy and group.greedy is not None and group.greedy.status is Status.FAILED
        if without or (compared and len(scored) == 1 and len(group.samples) > 1):
            lone += len(scored)
        elif scored:
            kept.append(scored)
            if group.greedy is not None:
                baselines.append(group.greedy.reward)
    return Usable(groups=kept, lone=lone, baselines=baselines)


def first_failure(groups: Sequence[Group]) -> str:
    """Why the first failed sample failed."""
    for group in groups:
        for sample in group.members:
            if sample.status is Status.FAILED:
                return f"sample {sample.uid}: {sample.failure or 'no reason given'}"
    return "no sample failed"


def failure_of(sample: Sample) -> str | None:
    """Why a sample failed, and what became of it; None where it did not."""
    if sample.status is Status.FAILED:
        return f"left out, {sample.failure or 'no reason given'}"
    reason = sample.metadata.get(REWARD_FAILURE)
    return None if reason is None else f"reward 0, since the reward function failed: {reason}"


class KLInReward:
    """The KL penalty of `algorithm.use_kl_in_reward`, with its controller's state.

    `direction` is which KL over the whole vocabulary it takes; None: one that is estimated from the
    log-probs of the sampled tokens.
    """

    def __init__(self, controller: KLController, kind: str) -> None:
        self._controller = controller
        self._kind = kind
        self.direction: KLDirection | None = FULL_KL.get(kind)

    def rewards(
        self,
        rewards_T: Tensor,
        batch: TrainBatch,
        full_kl_T: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """Token-level rewards (T,) in float64 less the penalty of each token, and metrics. Moves
        the controller. Needs `full_kl_T` of each token where there is a `direction`, else a batch
        with old and reference log-probs.
        """
        starts = batch.starts
        scores, mask = padded(rewards_T, starts), padded(batch.targets, starts)
        if self.direction is not None:
            assert full_kl_T is not None
            penalised, metrics = subtract_kl(
                scores, padded(full_kl_T, starts), mask, kl_ctrl=self._controller
            )
        else:
            assert batch.old_log_probs is not None
            assert batch.ref_log_probs is not None
            penalised, metrics = apply_kl_penalty(
                scores,
                padded(batch.old_log_probs, starts),
                padded(batch.ref_log_probs, starts),
                mask,
                kl_ctrl=self._controller,
                kl_penalty_kind=self._kind,
            )
        return unpadded(penalised, starts).double(), metrics

    def state_dict(self) -> dict[str, Any]:
        return {"kl_coef": self._controller.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # A fixed one is what this run's settings say.
        if isinstance(self._controller, AdaptiveKLController):
            self._controller.value = float(state["kl_coef"])


def mini_batches(
    batch: TrainBatch, group_sizes: Sequence[int], prompts: int | None, *, shuffle: str | None
) -> list[TrainBatch]:
    """Split by prompts; the rows of one group stay together.

    `group_sizes` are the rows of each group, in order; `prompts` None keeps the batch whole;
    `shuffle` is the seed of another order of the groups, None keeps theirs.
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
    """Rewards after penalties, advantages and staleness of what is trained on; with a `critic`
    returns and values."""
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
    """How many trained tokens were sampled how many weight versions ago."""
    ages = Counter[int]()
    for sample in samples:
        for segment in sample.segments:
            for span in segment.spans:
                trained = sum(map(bool, segment.loss_mask[span.start : span.end]))
                if trained and span.version >= 0:
                    ages[weight_version - span.version] += trained
    return ages


def _summary_of(prefix: str, values_T: Tensor) -> dict[str, float]:
    """`metrics.batch_metrics.summary` of a column, with the same bits and without a list of it."""
    if not len(values_T):
        return {}
    parts = (values_T[start : start + 4096].tolist() for start in range(0, len(values_T), 4096))
    return {
        f"{prefix}/mean": math.fsum(itertools.chain.from_iterable(parts)) / len(values_T),
        f"{prefix}/max": float(values_T.max()),
        f"{prefix}/min": float(values_T.min()),
    }
