"""REINFORCE++: advantages whitened over the whole batch. Called through the registry."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

from slipstream.algorithms.advantages.groups import (
    as_given,
    group_scores,
    masked_rewards,
    scores_of,
)
from slipstream.algorithms.advantages.whiten import masked_whiten
from slipstream.algorithms.registry import AdvantageEstimator, register_adv_est
from slipstream.algorithms.settings import AdvantageConfig


@register_adv_est(AdvantageEstimator.REINFORCE_PLUS_PLUS)
def reinforce_plus_plus(
    *,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    config: AdvantageConfig | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Returns G_t = r_t + gamma G_{t+1} over target tokens, carried through masked spans (tool
    replies), and A = whiten(G) over the whole batch; both 0 where the mask is.

    Source: REINFORCE++, https://arxiv.org/abs/2501.03262. VERL 0.6 forgets the return at a masked
    span, so that tokens before a tool reply learn nothing; later versions carry it as here.

    Raises:
        ValueError: fewer than two target tokens in the batch, or a score that is not finite.
    """
    rewards = masked_rewards(token_level_rewards, response_mask)
    gamma = 1.0 if config is None else config.gamma
    targets = response_mask != 0
    returns = torch.zeros_like(rewards)
    running = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[-1])):
        running = torch.where(targets[:, t], rewards[:, t] + gamma * running, running)
        returns[:, t] = torch.where(targets[:, t], running, 0.0)
    return as_given(masked_whiten(returns, response_mask), token_level_rewards, returns)


@register_adv_est(AdvantageEstimator.REINFORCE_PLUS_PLUS_BASELINE)
def reinforce_plus_plus_baseline(
    *, token_level_rewards: Tensor, response_mask: Tensor, index: Iterable[Hashable], **_: Any
) -> tuple[Tensor, Tensor]:
    """A = whiten over the batch of s_i - mean_g on all target tokens; a group of one keeps its raw
    score before that. Shapes as in `AdvantageFn`.

    Source: REINFORCE++-baseline, https://arxiv.org/abs/2501.03262; the rule for a group of one is
    VERL's: mean 0.

    Raises:
        ValueError: fewer than two target tokens in the batch, or a score that is not finite.
    """
    group = group_scores(scores_of(token_level_rewards), index)
    relative = torch.where(group.count > 1, group.centered, group.score)
    tiled = relative.unsqueeze(-1).expand(response_mask.shape)
    return as_given(masked_whiten(tiled, response_mask), token_level_rewards)
