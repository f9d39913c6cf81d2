"""ReMax: advantages with the reward of the greedy response as baseline."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from slipstream.algorithms.advantages.groups import (
    check_finite,
    check_finite_scores,
    check_keywords,
    check_shapes,
    finish,
    given_mask,
    required,
    return_to_go,
)
from slipstream.algorithms.registry import AdvantageEstimator, AdvantageNeed, register_adv_est


@register_adv_est(AdvantageEstimator.REMAX, needs=[AdvantageNeed.REWARD_BASELINES])
def remax(
    token_level_rewards: Tensor,
    reward_baselines: Tensor | None = None,
    response_mask: Tensor | None = None,
    config: object = None,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    """returns_t = sum of R over the target tokens from t on; A_t = returns_t - b_i.

    `reward_baselines` b (B,) are the scores of the prompts' greedy responses. Other shapes are as
    in `AdvantageFn`. The order of arguments is VERL's.

    Source: ReMax, https://arxiv.org/abs/2310.10505.

    Raises:
        TypeError: there is no mask.
        ValueError: there are no baselines, shapes differ, or a value is not finite.
    """
    check_keywords("remax", more)
    baselines = required("remax", AdvantageNeed.REWARD_BASELINES, reward_baselines)
    response_mask = given_mask("remax", response_mask)
    check_shapes(token_level_rewards=token_level_rewards, response_mask=response_mask)
    check_finite(response_mask, token_level_rewards=token_level_rewards)
    if baselines.shape != token_level_rewards.shape[:1]:
        raise ValueError(
            f"reward_baselines must have one score per row: got shape {tuple(baselines.shape)} for "
            f"{len(token_level_rewards)} rows"
        )
    check_finite_scores(baselines)
    returns = return_to_go(token_level_rewards, response_mask)
    advantages = returns - baselines.double().unsqueeze(-1)
    return (
        finish(advantages, response_mask, token_level_rewards),
        finish(returns, response_mask, token_level_rewards),
    )
