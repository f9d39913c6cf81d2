"""Advantages relative to the group's mean and spread.

Called by the rollout's batch preparation through the registry. Knows nothing about rewards or
policies.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

from slipstream.algorithms.advantages.groups import group_scores, sequence_scores, to_tokens
from slipstream.algorithms.registry import AdvantageEstimator, register_adv_est
from slipstream.algorithms.settings import AdvantageConfig

GRPO_EPS = 1e-6


@register_adv_est(AdvantageEstimator.GRPO)
@register_adv_est(AdvantageEstimator.GRPO_VECTORIZED)
def grpo(
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

    Raises:
        ValueError: shapes differ, or a score is not finite.
    """
    scores = sequence_scores(token_level_rewards, response_mask)
    relative = relative_scores(scores, index, config or AdvantageConfig())
    return to_tokens(relative, response_mask, token_level_rewards)


@register_adv_est(AdvantageEstimator.GRPO_PASSK)
def grpo_passk(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Iterable[Hashable],
    config: AdvantageConfig | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """The best response of a group gets A = (s_max - s_second) / (std_g + 1e-6), all others 0.

    Without `config.norm_adv_by_std_in_grpo` there is no division. Where several are best, all get
    0. Shapes as in `AdvantageFn`.

    Source: https://arxiv.org/abs/2503.19595, as VERL computes it.

    Raises:
        ValueError: a group of one, shapes differ, or a score is not finite.
    """
    group = group_scores(sequence_scores(token_level_rewards, response_mask), index)
    if bool((group.count < 2).any()):
        row = int((group.count < 2).nonzero()[0])
        raise ValueError(
            f"advantage estimator 'grpo_passk' compares the best response of a group with the "
            f"second best, and row {row} is alone in its group; set actor_rollout_ref.rollout.n "
            f"to 2 or more"
        )
    gap = torch.zeros_like(group.score)
    for slot in range(int(group.slot.max()) + 1 if len(group.slot) else 0):
        rows = (group.slot == slot).nonzero().squeeze(-1)
        top, place = group.score[rows].topk(2)
        gap[rows[place[0]]] = top[0] - top[1]
    if (config or AdvantageConfig()).norm_adv_by_std_in_grpo:
        gap = gap / (group.std + GRPO_EPS)
    return to_tokens(gap, response_mask, token_level_rewards)


def relative_scores(scores: Tensor, index: Iterable[Hashable], config: AdvantageConfig) -> Tensor:
    """(B,) float64: the advantages of `grpo` for (B,) scores."""
    group = group_scores(scores, index)
    by_std = config.norm_adv_by_std_in_grpo
    relative = group.centered / (group.std + GRPO_EPS) if by_std else group.centered
    return torch.where(group.count > 1, relative, group.score)
