"""Generalised advantages from a critic's values. Called through the registry."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipstream.algorithms.advantages.groups import as_given, masked_rewards
from slipstream.algorithms.advantages.whiten import masked_whiten
from slipstream.algorithms.aggregation import zero_masked
from slipstream.algorithms.registry import AdvantageEstimator, AdvantageNeed, register_adv_est
from slipstream.algorithms.settings import AdvantageConfig


@register_adv_est(AdvantageEstimator.GAE, needs=[AdvantageNeed.VALUES])
def gae(
    *,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    values: Tensor,
    config: AdvantageConfig | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """`compute_gae_advantage_return` with `config`'s gamma and lam."""
    config = config or AdvantageConfig()
    return compute_gae_advantage_return(
        token_level_rewards, values, response_mask, config.gamma, config.lam
    )


def compute_gae_advantage_return(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """delta_t = r_t + gamma V_{t+1} - V_t, G_t = delta_t + gamma lam G_{t+1}; A = whiten(G) over
    the batch, returns G + V. The next token is the next target: masked spans (tool replies) are
    skipped. All (B, T), 0 where the mask is.

    Source: GAE, https://arxiv.org/abs/1506.02438, eq. 16.

    Raises:
        ValueError: shapes differ, fewer than two target tokens, or a number that is not finite.
    """
    rewards = masked_rewards(token_level_rewards, response_mask)
    if values.shape != rewards.shape:
        raise ValueError(
            f"gae needs a value for each token, got values of shape {tuple(values.shape)} for "
            f"rewards of shape {tuple(rewards.shape)}"
        )
    state = zero_masked(values.double(), response_mask)
    if not bool(state.isfinite().all()):
        raise ValueError("gae: the critic's values are not finite; lower critic.optim.lr")
    targets = response_mask != 0
    ahead = torch.zeros_like(rewards[:, 0])
    gain = torch.zeros_like(ahead)
    gains = torch.zeros_like(rewards)
    for t in reversed(range(rewards.shape[-1])):
        here = targets[:, t]
        delta = rewards[:, t] + gamma * ahead - state[:, t]
        gain = torch.where(here, delta + gamma * lam * gain, gain)
        ahead = torch.where(here, state[:, t], ahead)
        gains[:, t] = torch.where(here, gain, 0.0)
    return as_given(masked_whiten(gains, response_mask), token_level_rewards, gains + state)


def estimate_advantages(
    rewards: Tensor, values: Tensor, dones: Tensor, gamma: float = 0.99, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """GAE over one stream of steps, (T,) or (T, N): (advantages, returns), not whitened.

    `values` of the states before the steps; after a step that is `done` another episode begins.
    After the last step nothing follows.

    Raises:
        ValueError: shapes differ.
    """
    if not rewards.shape == values.shape == dones.shape:
        raise ValueError(
            f"rewards, values and dones must have one shape, got {tuple(rewards.shape)}, "
            f"{tuple(values.shape)} and {tuple(dones.shape)}"
        )
    on = 1.0 - dones.double()
    ahead = gain = torch.zeros_like(values[0], dtype=torch.float64)
    advantages = torch.zeros_like(values, dtype=torch.float64)
    for t in reversed(range(len(rewards))):
        delta = rewards[t].double() + gamma * ahead * on[t] - values[t].double()
        gain = delta + gamma * lam * gain * on[t]
        ahead = values[t].double()
        advantages[t] = gain
    return as_given(advantages, rewards, advantages + values.double())
