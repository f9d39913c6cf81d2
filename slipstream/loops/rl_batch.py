"""From scored groups to what the trainer takes: rows, advantages, log-probs, mini-batches.

Knows groups and a backend to ask for log-probs; nothing of engines or of the course of a run.
Called by `loops.rl`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.algorithms import KLController, apply_kl_penalty
from slipstream.metrics.batch_metrics import summary
from slipstream.types import Group, Sample, Status, TrainBatch, TrainRow

REWARD_FAILURE = "reward_failure"
"""Where a sample's metadata keeps why its scoring failed and counts as zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usable:
    """The samples to train on, group by group (none of them empty), and those left out although
    they have a score: every other sample of their group failed."""

    groups: list[list[Sample]]
    lone: int

    @property
    def samples(self) -> list[Sample]:
        return [sample for group in self.groups for sample in group]


def usable_samples(groups: Sequence[Group], *, compared: bool = True) -> Usable:
    """Leave out failed samples, and, where advantages are `compared` within groups, a sample whose
    advantage has nothing to be relative to."""
    kept: list[list[Sample]] = []
    lone = 0
    for group in groups:
        scored = [s for s in group.samples if s.status is not Status.FAILED]
        if compared and len(scored) == 1 and len(group.samples) > 1:
            lone += 1
        elif scored:
            kept.append(scored)
    return Usable(groups=kept, lone=lone)


def first_failure(groups: Sequence[Group]) -> str:
    """Why the first failed sample failed."""
    for group in groups:
        for sample in group.samples:
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
    """The KL penalty of `algorithm.use_kl_in_reward`, with its controller's state."""

    def __init__(self, controller: KLController, kind: str) -> None:
        self._controller = controller
        self._kind = kind

    def rewards(
        self, samples: Sequence[Sample], rows: Sequence[TrainRow]
    ) -> tuple[list[float], dict[str, float]]:
        """Rewards less the penalty of each row's tokens, and metrics. Moves the controller.

        The rows need old and reference log-probs.
        """
        mask = _padded([_targets(row) for row in rows])
        scores = torch.zeros_like(mask)
        for i, sample in enumerate(samples):
            scores[i, 0] = sample.reward
        penalised, metrics = apply_kl_penalty(
            scores,
            _padded([row.old_log_probs or [] for row in rows]),
            _padded([row.ref_log_probs or [] for row in rows]),
            mask,
            kl_ctrl=self._controller,
            kl_penalty_kind=self._kind,
        )
        return penalised.sum(dim=-1).tolist(), metrics

    def state_dict(self) -> dict[str, Any]:
        return {"kl_coef": self._controller.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._controller.value = float(state["kl_coef"])


def mini_batches(
    batch: TrainBatch, group_sizes: Sequence[int], prompts: int | None, *, shuffle: str | None
) -> list[TrainBatch]:
    """Split by prompts; the rows of one group stay together.

    `group_sizes` are the rows of each group, in order; `prompts` None keeps the batch whole;
    `shuffle` is the seed of another order of the groups, None keeps theirs.
    """
    groups: list[list[TrainRow]] = []
    start = 0
    for size in group_sizes:
        groups.append(batch.rows[start : start + size])
        start += size
    if shuffle is not None:
        random.Random(shuffle).shuffle(groups)
    width = prompts or len(groups)
    return [
        TrainBatch(
            rows=[row for group in groups[first : first + width] for row in group],
            temperature=batch.temperature,
        )
        for first in range(0, len(groups), width)
    ]


def batch_metrics(
    batch: TrainBatch, rewards: Sequence[float], usable: Usable, weight_version: int
) -> dict[str, float]:
    """Rewards after penalties, advantages and staleness of what is trained on."""
    advantages = [
        a
        for row in batch.rows
        if row.advantages is not None
        for a, target in zip(row.advantages, _targets(row), strict=True)
        if target
    ]
    ages = [
        weight_version - version
        for sample in usable.samples
        for version, weight in zip(sample.versions, sample.loss_mask, strict=True)
        if weight and version >= 0
    ]
    metrics = summary("critic/rewards", rewards) | summary("critic/advantages", advantages)
    if ages:
        metrics["rollout/staleness/mean"] = sum(ages) / len(ages)
        metrics["rollout/staleness/max"] = float(max(ages))
    return metrics


def _targets(row: TrainRow) -> list[float]:
    """1.0 on the tokens that are predicted; the first token of a row never is."""
    return [1.0 if t and weight else 0.0 for t, weight in enumerate(row.loss_mask)]


def _padded(rows: Sequence[Sequence[float]]) -> Tensor:
    """(B, T), zeros behind the end of each row."""
    width = max(len(row) for row in rows)
    out = torch.zeros(len(rows), width)
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.tensor(row)
    return out
