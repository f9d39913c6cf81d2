"""The optimal baseline of a response by its length. Called through the registry."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

from slipstream.algorithms.advantages.groups import group_scores, group_slots, scores_of, to_tokens
from slipstream.algorithms.registry import AdvantageEstimator, register_adv_est


@register_adv_est(AdvantageEstimator.OPO)
def opo(
    *, token_level_rewards: Tensor, response_mask: Tensor, index: Iterable[Hashable], **_: Any
) -> tuple[Tensor, Tensor]:
    """A_i = s_i - sum_g(l s) / sum_g(l), l the number of target tokens: long responses weigh more
    in the baseline. A group of one, and one without any target token, keeps its raw scores. Shapes
    as in `AdvantageFn`.

    Source: OPO, https://arxiv.org/abs/2505.23585, eq. 7; the rule for a group of one is VERL's.
    """
    keys = list(index)
    group = group_scores(scores_of(token_level_rewards), keys)
    slot, groups = group_slots(keys, group.score)
    length = (response_mask != 0).double().sum(dim=-1)

    def total(values: Tensor) -> Tensor:
        sums = torch.zeros(groups, dtype=torch.float64, device=values.device)
        return sums.index_add_(0, slot, values)[slot]

    tokens = total(length)
    # Around the mean, so that equal scores come to exactly 0.
    shift = total(length * group.centered) / torch.where(tokens > 0, tokens, 1.0)
    alone = (group.count == 1) | (tokens == 0)
    return to_tokens(
        torch.where(alone, group.score, group.centered - shift), response_mask, token_level_rewards
    )
