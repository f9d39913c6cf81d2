"""GRPO and its relatives: scores against the mean of their group. Called through the registry."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

from slipstream.algorithms.advantages.groups import (
    GRPO_EPS,
    group_scores,
    group_slots,
    scores_of,
    to_tokens,
)
from slipstream.algorithms.registry import AdvantageEstimator, register_adv_est
from slipstream.algorithms.settings import AdvantageConfig


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
    return to_tokens(
        relative_scores(scores_of(token_level_rewards), index, config),
        response_mask,
        token_level_rewards,
    )


def relative_scores(
    scores: Tensor, index: Iterable[Hashable], config: AdvantageConfig | None
) -> Tensor:
    """(B,) advantages of `grpo` from (B,) scores."""
    group = group_scores(scores, index)
    by_std = config is None or config.norm_adv_by_std_in_grpo
    relative = group.centered / (group.std + GRPO_EPS) if by_std else group.centered
    return torch.where(group.count > 1, relative, group.score)


@register_adv_est(AdvantageEstimator.GRPO_PASSK)
def grpo_passk(
    *,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Iterable[Hashable],
    config: AdvantageConfig | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Pass@k: the best response of a group gets (s_best - s_second) / (std_g + 1e-6), all others 0;
    the first one of several best gets 0, too. Without `config.norm_adv_by_std_in_grpo` nothing is
    divided. Shapes as in `AdvantageFn`.

    Source: https://arxiv.org/abs/2503.19595.

    Raises:
        ValueError: a group of one has no second.
    """
    keys = list(index)
    scores = scores_of(token_level_rewards)
    group = group_scores(scores, keys)
    if bool((group.count < 2).any()):
        row = int((group.count < 2).nonzero()[0])
        raise ValueError(
            f"grpo_passk compares the best two responses of a group, and row {row} is alone in its "
            "own; set actor_rollout_ref.rollout.n=2 or more, or another estimator"
        )
    slot, groups = group_slots(keys, scores)
    by_std = config is None or config.norm_adv_by_std_in_grpo
    advantages = torch.zeros_like(scores)
    for g in range(groups):
        rows = (slot == g).nonzero().squeeze(-1)
        first = rows[scores[rows].argmax()]
        second = scores[rows[rows != first]].max()
        gap = scores[first] - second
        advantages[first] = gap / (group.std[first] + GRPO_EPS) if by_std else gap
    return to_tokens(advantages, response_mask, token_level_rewards)
