"""Advantages of scored responses relative to their group.

A group is the responses to one prompt: rows of equal `index`, in any order. With s_i the sum of
row i's token-level rewards, every estimator here gives one number per response, written to each
of its tokens (0 where the mask is 0); `returns` equal the advantages. Called by the rollout's batch
preparation through the registry. Knows nothing about rewards or policies.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.algorithms.registry import AdvantageEstimator, register_adv_est
from slipstream.algorithms.settings import AdvantageConfig

GRPO_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class GroupScores:
    """Scores with their group statistics, each (B,) and float64: row i holds its group's value.

    `centered` is s - mean; exactly 0 in a group of equal scores. `std` is the sample standard
    deviation (n - 1), 0 in groups of one.
    """

    score: Tensor
    centered: Tensor
    count: Tensor
    std: Tensor


def group_scores(scores: Tensor, index: Iterable[Hashable]) -> GroupScores:
    """Group statistics of (B,) `scores` by the B keys `index`.

    Raises:
        ValueError: the lengths differ, or a score is not finite.
    """
    slot_of: dict[Hashable, int] = {}
    slots = [slot_of.setdefault(key, len(slot_of)) for key in index]
    if scores.ndim != 1 or len(slots) != len(scores):
        raise ValueError(
            f"one group key per row is needed: got {len(slots)} keys for scores of shape "
            f"{tuple(scores.shape)}"
        )
    # Sums of float32 numbers are exact in float64 at these sizes: equal scores centre to exactly 0,
    # where a rounded mean would leave a remainder that the division by std + eps blows up.
    score = scores.float().double()
    if not bool(score.isfinite().all()):
        row = int((~score.isfinite()).nonzero()[0])
        raise ValueError(
            f"the score of row {row} is {float(scores[row])}: it would spoil its whole group; "
            f"treat a reward that cannot be computed as failed"
        )
    slot = torch.tensor(slots, dtype=torch.long, device=scores.device)
    count = torch.bincount(slot, minlength=len(slot_of)).double()

    def total(values: Tensor) -> Tensor:
        return torch.zeros_like(count).index_add_(0, slot, values)

    centered = score - (total(score) / count)[slot]
    variance = total(centered**2) / (count - 1).clamp(min=1)
    return GroupScores(score=score, centered=centered, count=count[slot], std=variance.sqrt()[slot])


@register_adv_est(AdvantageEstimator.GRPO)
@register_adv_est(AdvantageEstimator.GRPO_VECTORIZED)
def grpo(
    *,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Iterable[Hashable],
    config: AdvantageConfig | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """A_i = (s_i - mean_g) / (std_g + 1e-6), std with n - 1; a group of one keeps its raw score.

    Without `config.norm_adv_by_std_in_grpo`: A_i = s_i - mean_g. Shapes as in `AdvantageFn`.

    Source: GRPO, https://arxiv.org/abs/2402.03300, eq. 4; without std: Dr. GRPO,
    https://arxiv.org/abs/2503.20783. The rule for a group of one is VERL's: mean 0 and std 1.
    """
    group = group_scores(token_level_rewards.sum(dim=-1), index)
    by_std = config is None or config.norm_adv_by_std_in_grpo
    relative = group.centered / (group.std + GRPO_EPS) if by_std else group.centered
    return _to_tokens(torch.where(group.count > 1, relative, group.score), response_mask)


@register_adv_est(AdvantageEstimator.RLOO)
def rloo(
    *, token_level_rewards: Tensor, response_mask: Tensor, index: Iterable[Hashable], **_: Any
) -> tuple[Tensor, Tensor]:
    """A_i = s_i - mean of the others' scores = n / (n - 1) (s_i - mean_g); a group of one keeps its
    raw score. Shapes as in `AdvantageFn`.

    Source: RLOO, https://arxiv.org/abs/2402.14740. The rule for a group of one is that of VERL's
    estimator of this name; `rloo_vectorized` differs.
    """
    group = group_scores(token_level_rewards.sum(dim=-1), index)
    return _to_tokens(
        torch.where(group.count > 1, _leave_one_out(group), group.score), response_mask
    )


@register_adv_est(AdvantageEstimator.RLOO_VECTORIZED)
def rloo_vectorized(
    *, token_level_rewards: Tensor, response_mask: Tensor, index: Iterable[Hashable], **_: Any
) -> tuple[Tensor, Tensor]:
    """As `rloo`, but a group of one, which has no others to compare with, gets A = 0.

    Source: RLOO, https://arxiv.org/abs/2402.14740, with the rule of VERL's estimator of this name.
    """
    group = group_scores(token_level_rewards.sum(dim=-1), index)
    return _to_tokens(_leave_one_out(group), response_mask)


@register_adv_est(AdvantageEstimator.GPG)
def gpg(
    *, token_level_rewards: Tensor, response_mask: Tensor, index: Iterable[Hashable], **_: Any
) -> tuple[Tensor, Tensor]:
    """A_i = alpha (s_i - mean_g), alpha = B / max(number of non-zero scores, 1); a group of one
    keeps alpha times its raw score.

    alpha counts over the rows given: call it with the whole batch. Shapes as in `AdvantageFn`.

    Source: GPG, https://arxiv.org/abs/2504.02546, as VERL computes it (f_norm = 1).
    """
    group = group_scores(token_level_rewards.sum(dim=-1), index)
    alpha = len(group.score) / max(int((group.score != 0).sum()), 1)
    relative = torch.where(group.count > 1, group.centered, group.score)
    return _to_tokens(alpha * relative, response_mask)


def _leave_one_out(group: GroupScores) -> Tensor:
    return group.centered * group.count / (group.count - 1).clamp(min=1)


def _to_tokens(per_row: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    mask = response_mask.to(torch.float32)
    advantages = per_row.to(torch.float32).unsqueeze(-1) * mask
    return advantages, advantages.clone()
