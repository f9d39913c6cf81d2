"""REINFORCE++: advantages that are normalized over the batch, without a critic.

Whitening is over all given rows, so pass the whole batch.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

from slipstream.algorithms.advantages.groups import (
    check_finite,
    check_keywords,
    check_shapes,
    finish,
    group_scores,
    return_to_go,
    sequence_scores,
)
from slipstream.algorithms.advantages.whiten import masked_whiten
from slipstream.algorithms.registry import AdvantageEstimator, register_adv_est
from slipstream.algorithms.settings import AdvantageConfig


@register_adv_est(AdvantageEstimator.REINFORCE_PLUS_PLUS)
def reinforce_plus_plus(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    config: AdvantageConfig | None = None,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    """returns_t = R_t + gamma returns_t', where t' is the next target token; A = whitened returns.

    Masked tokens, such as tool responses, are skipped: they do not discount, and rewards after them
    count (VERL up to 0.7 drops these). Shapes are as in `AdvantageFn`. The returns are not
    whitened.

    Source: REINFORCE++, https://arxiv.org/abs/2501.03262.

    Raises:
        ValueError: fewer than two target tokens, shapes differ, or a reward is not finite.
    """
    check_keywords("reinforce_plus_plus", more)
    check_shapes(token_level_rewards=token_level_rewards, response_mask=response_mask)
    check_finite(response_mask, token_level_rewards=token_level_rewards)
    gamma = AdvantageConfig.of(config).gamma
    returns = return_to_go(token_level_rewards, response_mask, gamma)
    advantages = masked_whiten(returns, response_mask)
    return (
        finish(advantages, response_mask, token_level_rewards),
        finish(returns, response_mask, token_level_rewards),
    )


@register_adv_est(AdvantageEstimator.REINFORCE_PLUS_PLUS_BASELINE)
def reinforce_plus_plus_baseline(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Iterable[Hashable],
    epsilon: float | None = None,
    config: object = None,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    """A = s_i - mean_g on each target token, whitened over all target tokens. The returns equal A.

    A group of one has s_i instead of s_i - mean_g before whitening. Shapes are as in `AdvantageFn`.

    Source: REINFORCE++-baseline, https://arxiv.org/abs/2501.03262. The rule for a group of one is
    VERL's.

    Raises:
        ValueError: fewer than two target tokens, shapes differ, or a score is not finite.
    """
    check_keywords("reinforce_plus_plus_baseline", more)
    group = group_scores(sequence_scores(token_level_rewards, response_mask), index)
    relative = torch.where(group.count > 1, group.centered, group.score)
    whitened = masked_whiten(relative.unsqueeze(-1).expand(response_mask.shape), response_mask)
    advantages = finish(whitened, response_mask, token_level_rewards)
    return advantages, advantages.clone()
