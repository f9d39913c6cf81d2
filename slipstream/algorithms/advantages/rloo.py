"""RLOO: advantages with the mean score of the group's other responses as baseline."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

from slipstream.algorithms.advantages.groups import (
    GroupScores,
    check_keywords,
    group_scores,
    sequence_scores,
    to_tokens,
)
from slipstream.algorithms.registry import AdvantageEstimator, register_adv_est


@register_adv_est(AdvantageEstimator.RLOO)
def rloo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Iterable[Hashable],
    epsilon: float | None = None,
    config: object = None,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    """A_i = s_i - mean of the other scores = n / (n - 1) (s_i - mean_g). In a group of one,
    A_i = s_i. Shapes are as in `AdvantageFn`.

    Source: RLOO, https://arxiv.org/abs/2402.14740. The rule for a group of one is that of VERL's
    estimator of this name; `rloo_vectorized` has another.

    Raises:
        ValueError: shapes differ, or a score is not finite.
    """
    check_keywords("rloo", more)
    group = group_scores(sequence_scores(token_level_rewards, response_mask), index)
    per_row = torch.where(group.count > 1, _leave_one_out(group), group.score)
    return to_tokens(per_row, response_mask, token_level_rewards)


@register_adv_est(AdvantageEstimator.RLOO_VECTORIZED)
def rloo_vectorized(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Iterable[Hashable],
    epsilon: float | None = None,
    config: object = None,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    """Like `rloo`, but A = 0 in a group of one.

    Source: RLOO, https://arxiv.org/abs/2402.14740, with the rule of VERL's estimator of this name.

    Raises:
        ValueError: shapes differ, or a score is not finite.
    """
    check_keywords("rloo_vectorized", more)
    group = group_scores(sequence_scores(token_level_rewards, response_mask), index)
    return to_tokens(_leave_one_out(group), response_mask, token_level_rewards)


def _leave_one_out(group: GroupScores) -> Tensor:
    return group.centered * group.count / (group.count - 1).clamp(min=1)
