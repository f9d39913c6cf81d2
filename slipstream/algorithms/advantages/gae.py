"""Generalized advantage estimation with a critic's values.

Whitening is over all given rows, so pass the whole batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipstream.algorithms.advantages.groups import (
    check_finite,
    check_keywords,
    check_shapes,
    finish,
    given_mask,
    required,
)
from slipstream.algorithms.advantages.whiten import masked_whiten
from slipstream.algorithms.aggregation import zero_masked
from slipstream.algorithms.registry import AdvantageEstimator, AdvantageNeed, register_adv_est
from slipstream.algorithms.settings import AdvantageConfig


@register_adv_est(AdvantageEstimator.GAE, needs=[AdvantageNeed.VALUES])
def gae(
    token_level_rewards: Tensor,
    values: Tensor | None = None,
    response_mask: Tensor | None = None,
    gamma: float | None = None,
    lam: float | None = None,
    config: AdvantageConfig | None = None,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    """`compute_gae_advantage_return` with `gamma` and `lam`, by default those of `config`.

    `values` (B, T) are the critic's. Other shapes are as in `AdvantageFn`. The order of arguments
    is VERL's.

    Raises:
        TypeError: there is no mask.
        ValueError: there are no values, or as in `compute_gae_advantage_return`.
    """
    check_keywords("gae", more)
    values = required("gae", AdvantageNeed.VALUES, values)
    mask = given_mask("gae", response_mask)
    settings = AdvantageConfig.of(config)
    gamma = settings.gamma if gamma is None else gamma
    lam = settings.lam if lam is None else lam
    return compute_gae_advantage_return(token_level_rewards, values, mask, gamma, lam)


def compute_gae_advantage_return(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """G_t = delta_t + gamma lam G_t', delta_t = R_t + gamma V_t' - V_t, where t' is the next target
    token (V and G are 0 after the last one). Returns are G + V, advantages are G whitened over the
    batch.

    Masked tokens, such as tool responses, are skipped. All tensors are (B, T).

    Source: GAE, https://arxiv.org/abs/1506.02438, eq. 16.

    Raises:
        ValueError: there are fewer than two target tokens, shapes differ, or a reward or value is
            not finite.
    """
    check_shapes(
        token_level_rewards=token_level_rewards, values=values, response_mask=response_mask
    )
    check_finite(response_mask, token_level_rewards=token_level_rewards, values=values)
    target = response_mask != 0
    rewards = zero_masked(token_level_rewards.double(), response_mask)
    values = zero_masked(values.double(), response_mask)
    next_value = rewards.new_zeros(len(rewards))
    running = torch.zeros_like(next_value)
    columns = []
    for t in reversed(range(rewards.shape[1])):
        here = target[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        running = torch.where(here, delta + gamma * lam * running, running)
        next_value = torch.where(here, values[:, t], next_value)
        columns.append(running)
    estimates = torch.stack(columns[::-1], dim=-1) if columns else rewards
    advantages = masked_whiten(estimates, response_mask)
    return (
        finish(advantages, response_mask, token_level_rewards),
        finish(estimates + values, response_mask, token_level_rewards),
    )


def estimate_advantages(
    rewards: Tensor, values: Tensor, dones: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """(advantages, returns) of trajectories of steps, without mask and whitening.

    G_t = delta_t + gamma lam (1 - done_t) G_t+1, delta_t = r_t + gamma (1 - done_t) V_t+1 - V_t;
    returns = G + V. `rewards` and `dones` are (..., T). `values` are (..., T), with V = 0 after the
    last step, or (..., T + 1) to bootstrap from the state after the last step.

    Source: GAE, https://arxiv.org/abs/1506.02438, eq. 16.

    Raises:
        ValueError: the shapes do not fit.
    """
    steps = rewards.shape[-1] if rewards.ndim else 0
    fits = values.shape[:-1] == rewards.shape[:-1] and values.shape[-1:] in {(steps,), (steps + 1,)}
    if rewards.ndim == 0 or dones.shape != rewards.shape or not fits:
        raise ValueError(
            f"rewards and dones must be (..., T), values (..., T) or (..., T + 1); got "
            f"{tuple(rewards.shape)}, {tuple(dones.shape)} and {tuple(values.shape)}"
        )
    not_done = (dones == 0).double()
    reward, value = rewards.double(), values.double()
    after = value[..., steps] if value.shape[-1] > steps else torch.zeros_like(value[..., 0])
    running = torch.zeros_like(after)
    columns = []
    for t in reversed(range(steps)):
        delta = reward[..., t] + gamma * not_done[..., t] * after - value[..., t]
        running = delta + gamma * lam * not_done[..., t] * running
        after = value[..., t]
        columns.append(running)
    advantages = torch.stack(columns[::-1], dim=-1)
    dtype = torch.float64 if rewards.dtype == torch.float64 else torch.float32
    return advantages.to(dtype), (advantages + value[..., :steps]).to(dtype)
