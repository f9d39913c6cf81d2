"""Baselines per token that minimise the variance of the gradient. Called through the registry."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

from slipstream.algorithms.advantages.groups import (
    as_given,
    group_slots,
    masked_rewards,
    returns_to_go,
)
from slipstream.algorithms.aggregation import zero_masked
from slipstream.algorithms.registry import AdvantageEstimator, AdvantageNeed, register_adv_est

EPS = 1e-8

_NEEDS = (
    AdvantageNeed.OLD_LOG_PROBS,
    AdvantageNeed.SUM_PI_SQUARED,
    AdvantageNeed.ROLLOUT_IS_WEIGHTS,
)


@register_adv_est(AdvantageEstimator.OPTIMAL_TOKEN_BASELINE, needs=_NEEDS)
def optimal_token_baseline(
    *,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Iterable[Hashable],
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """A_t = G_t - B_t, G_t the sum of the rewards from t on, and at each position of a group

        B_t = sum_i G_it W_it / (sum_i W_it + 1e-8),
        W_t = sum_{s <= t} (1 - 2 pi_s + sum_v pi_v^2) [w_s^2],

    the squared norm of the score function so far as seen in the logits, weighted by importance
    weights where there are some. A group of one has baseline 0; so has what its single longest
    response has beyond the second longest, where there is nobody to compare with. Returns: G.

    Source: https://richardli.xyz/optimal-token-baseline, as in VERL.

    Raises:
        ValueError: shapes differ, or a reward is not finite.
    """
    return _baselined(
        token_level_rewards, response_mask, index, old_log_probs, sum_pi_squared, rollout_is_weights
    )


@register_adv_est(AdvantageEstimator.TIR_OPTIMAL_TOKEN_BASELINE, needs=_NEEDS)
def tir_optimal_token_baseline(
    *,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Iterable[Hashable],
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """`optimal_token_baseline` with the target tokens of a row counted by themselves, so that the
    k-th written tokens are compared whatever tool replies stand between them."""
    order = (response_mask == 0).to(torch.int8).sort(dim=-1, stable=True).indices

    def packed(values: Tensor) -> Tensor:
        return values.gather(-1, order)

    advantages, returns = _baselined(
        packed(zero_masked(token_level_rewards, response_mask)),
        packed(response_mask),
        index,
        packed(old_log_probs),
        packed(sum_pi_squared),
        None if rollout_is_weights is None else packed(rollout_is_weights),
    )

    def unpacked(values: Tensor) -> Tensor:
        return torch.zeros_like(values).scatter(-1, order, values)

    return unpacked(advantages), unpacked(returns)


def _baselined(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Iterable[Hashable],
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    weights: Tensor | None,
) -> tuple[Tensor, Tensor]:
    rewards = masked_rewards(token_level_rewards, response_mask)
    for name, given in (("old_log_probs", old_log_probs), ("sum_pi_squared", sum_pi_squared)):
        if given.shape != rewards.shape:
            raise ValueError(
                f"{name} must have the rewards' shape {tuple(rewards.shape)}, got "
                f"{tuple(given.shape)}"
            )
    targets = (response_mask != 0).double()
    slot, groups = group_slots(index, rewards[:, 0])
    probability = zero_masked(old_log_probs.double(), targets).exp()
    energy = targets * (1 - 2 * probability + zero_masked(sum_pi_squared.double(), targets))
    if weights is not None:
        energy = energy * zero_masked(weights.double(), targets).square()
    weight = energy.cumsum(dim=-1) * targets
    returns = returns_to_go(rewards) * targets

    def total(values: Tensor) -> Tensor:
        return values.new_zeros(groups, values.shape[-1]).index_add_(0, slot, values)

    baseline = (total(returns * weight) / (total(weight) + EPS))[slot]
    length = targets.cumsum(dim=-1).argmax(dim=-1) + (targets.sum(dim=-1) > 0).long()
    for g in range(groups):
        rows = (slot == g).nonzero().squeeze(-1)
        if len(rows) == 1:
            baseline[rows] = 0.0
            continue
        ends = length[rows].sort(descending=True).values
        if ends[0] > ends[1]:
            longest = rows[length[rows].argmax()]
            baseline[longest, ends[1] :] = 0.0
    return as_given((returns - baseline) * targets, token_level_rewards, returns)
