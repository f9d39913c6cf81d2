"""ReMax: the reward of a greedy response as the baseline. Called through the registry."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from slipstream.algorithms.advantages.groups import as_given, masked_rewards, returns_to_go
from slipstream.algorithms.registry import AdvantageEstimator, AdvantageNeed, register_adv_est


@register_adv_est(AdvantageEstimator.REMAX, needs=[AdvantageNeed.REWARD_BASELINES])
def remax(
    *, token_level_rewards: Tensor, response_mask: Tensor, reward_baselines: Tensor, **_: Any
) -> tuple[Tensor, Tensor]:
    """A_t = R_t - b_i on target tokens, with R_t the sum of the rewards from t on and (B,) `b` the
    reward of the greedy response to the row's prompt. Returns: R.

    Source: ReMax, https://arxiv.org/abs/2310.10505.

    Raises:
        ValueError: another number of baselines than of rows, or a number that is not finite.
    """
    rewards = masked_rewards(token_level_rewards, response_mask)
    if reward_baselines.shape != rewards.shape[:1]:
        raise ValueError(
            f"remax needs a baseline for each of {len(rewards)} rows, got shape "
            f"{tuple(reward_baselines.shape)}"
        )
    if not bool(reward_baselines.isfinite().all()):
        raise ValueError("remax: the reward of a greedy response is not finite")
    targets = response_mask != 0
    returns = returns_to_go(rewards) * targets
    advantages = returns - reward_baselines.double().unsqueeze(-1) * targets
    return as_given(advantages, token_level_rewards, returns)
