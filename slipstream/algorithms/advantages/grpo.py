"""GRPO: advantages relative to the mean and standard deviation of the group."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

from slipstream.algorithms.advantages.groups import (
    check_keywords,
    group_scores,
    sequence_scores,
    to_tokens,
)
from slipstream.algorithms.registry import AdvantageEstimator, register_adv_est
from slipstream.algorithms.settings import AdvantageConfig

GRPO_EPS = 1e-6


@register_adv_est(AdvantageEstimator.GRPO)
@register_adv_est(AdvantageEstimator.GRPO_VECTORIZED)
def grpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Iterable[Hashable],
    epsilon: float = GRPO_EPS,
    norm_adv_by_std_in_grpo: bool | None = None,
    config: AdvantageConfig | None = None,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    """A_i = (s_i - mean_g) / (std_g + epsilon), with std over n - 1. In a group of one, A_i = s_i.

    If `norm_adv_by_std_in_grpo` (None: that of `config`) is False, A_i = s_i - mean_g. Shapes are
    as in `AdvantageFn`.

    Source: GRPO, https://arxiv.org/abs/2402.03300, eq. 4; without std: Dr. GRPO,
    https://arxiv.org/abs/2503.20783. The rule for a group of one is VERL's (mean 0 and std 1).

    Raises:
        ValueError: shapes differ, or a score is not finite.
    """
    check_keywords("grpo", more)
    scores = sequence_scores(token_level_rewards, response_mask)
    by_std = divides_by_std(norm_adv_by_std_in_grpo, config)
    relative = relative_scores(scores, index, by_std, epsilon)
    return to_tokens(relative, response_mask, token_level_rewards)


@register_adv_est(AdvantageEstimator.GRPO_PASSK)
def grpo_passk(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Iterable[Hashable],
    epsilon: float = GRPO_EPS,
    norm_adv_by_std_in_grpo: bool | None = None,
    config: AdvantageConfig | None = None,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    """The best response of a group gets A = (s_max - s_second) / (std_g + epsilon), all others 0.

    Without `norm_adv_by_std_in_grpo` there is no division, as in `grpo`. If several responses are
    best, all get 0. Shapes are as in `AdvantageFn`.

    Source: https://arxiv.org/abs/2503.19595, as VERL computes it.

    Raises:
        ValueError: there is a group of one, shapes differ, or a score is not finite.
    """
    check_keywords("grpo_passk", more)
    group = group_scores(sequence_scores(token_level_rewards, response_mask), index)
    if bool((group.count < 2).any()):
        row = int((group.count < 2).nonzero()[0])
        raise ValueError(
            f"advantage estimator 'grpo_passk' compares the best response of a group with the "
            f"second best, but row {row} is alone in its group; set actor_rollout_ref.rollout.n "
            f"to 2 or more"
        )
    gap = torch.zeros_like(group.score)
    for slot in range(int(group.slot.max()) + 1 if len(group.slot) else 0):
        rows = (group.slot == slot).nonzero().squeeze(-1)
        top, place = group.score[rows].topk(2)
        gap[rows[place[0]]] = top[0] - top[1]
    if divides_by_std(norm_adv_by_std_in_grpo, config):
        gap = gap / (group.std + epsilon)
    return to_tokens(gap, response_mask, token_level_rewards)


def relative_scores(
    scores: Tensor, index: Iterable[Hashable], by_std: bool, epsilon: float = GRPO_EPS
) -> Tensor:
    """The advantages (B,) of `grpo` for `scores` (B,), in float64."""
    group = group_scores(scores, index)
    relative = group.centered / (group.std + epsilon) if by_std else group.centered
    return torch.where(group.count > 1, relative, group.score)


def divides_by_std(given: bool | None, config: AdvantageConfig | None) -> bool:
    """`norm_adv_by_std_in_grpo` of a call, or of `config` if the call has None."""
    return AdvantageConfig.of(config).norm_adv_by_std_in_grpo if given is None else given
