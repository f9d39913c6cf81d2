"""OPO: advantages with a length-weighted baseline."""

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


@register_adv_est(AdvantageEstimator.OPO)
def opo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Iterable[Hashable],
    epsilon: float | None = None,
    config: object = None,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    """A_i = s_i - sum_j l_j s_j / sum_j l_j over the group, where l is the number of target tokens.
    In a group of one, A_i = s_i.

    An empty response has no weight in the baseline. Shapes are as in `AdvantageFn`.

    Source: OPO, https://arxiv.org/abs/2505.23585. The rule for a group of one is VERL's.

    Raises:
        ValueError: shapes differ, or a score is not finite.
    """
    check_keywords("opo", more)
    group = group_scores(sequence_scores(token_level_rewards, response_mask), index)
    length = (response_mask != 0).sum(dim=-1).double()
    # Relative to the mean, so that equal scores give exactly 0. The clamp is for groups of empty
    # rows, which are masked anyway.
    baseline = group.total(length * group.centered) / group.total(length).clamp(min=1)
    per_row = torch.where(group.count > 1, group.centered - baseline, group.score)
    return to_tokens(per_row, response_mask, token_level_rewards)
