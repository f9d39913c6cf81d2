"""OTB: advantages with a baseline per token that minimizes the variance of the gradient."""

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
    required,
    return_to_go,
    sequence_scores,
)
from slipstream.algorithms.aggregation import zero_masked
from slipstream.algorithms.registry import AdvantageEstimator, AdvantageNeed, register_adv_est

BASELINE_EPS = 1e-8

_NEEDS = [
    AdvantageNeed.OLD_LOG_PROBS,
    AdvantageNeed.SUM_PI_SQUARED,
    AdvantageNeed.ROLLOUT_IS_WEIGHTS,
]


@register_adv_est(AdvantageEstimator.OPTIMAL_TOKEN_BASELINE, needs=_NEEDS)
def optimal_token_baseline(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Iterable[Hashable],
    old_log_probs: Tensor | None = None,
    sum_pi_squared: Tensor | None = None,
    rollout_is_weights: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    """A_it = G_it - B_t, B_t = sum_i G_it W_it / (sum_i W_it + 1e-8) over the group's responses
    that have a target token at t; returns = G, the sum of rewards over target tokens from t on.

    W_it is the sum of (1 - 2 pi + sum_v pi_v^2) w^2 over the target tokens up to t, a proxy of the
    squared gradient. pi is exp(`old_log_probs`), sum_v pi_v^2 is `sum_pi_squared`, w is
    `rollout_is_weights` (None: 1), all (B, T). If only one response has a token at t, its own
    return would be the baseline, so B_t = 0 there, also in a group of one. (VERL does this only in
    the tail of a single longest response.) Other shapes are as in `AdvantageFn`.

    Source: OTB, https://arxiv.org/abs/2602.07078.

    Raises:
        ValueError: `old_log_probs` or `sum_pi_squared` is missing, shapes differ, or a value is not
            finite.
    """
    check_keywords("optimal_token_baseline", more)
    return _token_baseline(
        "optimal_token_baseline",
        token_level_rewards,
        response_mask,
        index,
        old_log_probs,
        sum_pi_squared,
        rollout_is_weights,
        packed=False,
    )


@register_adv_est(AdvantageEstimator.TIR_OPTIMAL_TOKEN_BASELINE, needs=_NEEDS)
def tir_optimal_token_baseline(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Iterable[Hashable],
    old_log_probs: Tensor | None = None,
    sum_pi_squared: Tensor | None = None,
    rollout_is_weights: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    """Like `optimal_token_baseline`, but t counts target tokens: the n-th target token of a
    response is compared with the n-th of the others, without counting the tool responses between.

    Source: OTB, https://arxiv.org/abs/2602.07078, for tool-integrated reasoning as in VERL.

    Raises:
        ValueError: as in `optimal_token_baseline`.
    """
    check_keywords("tir_optimal_token_baseline", more)
    return _token_baseline(
        "tir_optimal_token_baseline",
        token_level_rewards,
        response_mask,
        index,
        old_log_probs,
        sum_pi_squared,
        rollout_is_weights,
        packed=True,
    )


def _token_baseline(
    name: str,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Iterable[Hashable],
    old_log_probs: Tensor | None,
    sum_pi_squared: Tensor | None,
    rollout_is_weights: Tensor | None,
    *,
    packed: bool,
) -> tuple[Tensor, Tensor]:
    columns = {
        "token_level_rewards": token_level_rewards,
        "old_log_probs": required(name, AdvantageNeed.OLD_LOG_PROBS, old_log_probs),
        "sum_pi_squared": required(name, AdvantageNeed.SUM_PI_SQUARED, sum_pi_squared),
    }
    if rollout_is_weights is not None:
        columns["rollout_is_weights"] = rollout_is_weights
    check_shapes(response_mask=response_mask, **columns)
    check_finite(response_mask, **columns)
    slot = group_scores(sequence_scores(token_level_rewards, response_mask), index).slot

    returns = return_to_go(token_level_rewards, response_mask)
    energy = 1 - 2 * columns["old_log_probs"].double().exp() + columns["sum_pi_squared"].double()
    if rollout_is_weights is not None:
        energy = energy * rollout_is_weights.double().square()
    weight = zero_masked(energy, response_mask).cumsum(dim=-1)

    target = response_mask != 0
    # Move each row's target tokens to the front, so that column n has the n-th one of every row.
    order = torch.argsort((~target).int(), dim=-1, stable=True) if packed else None
    aligned = [target.double(), zero_masked(weight, target), zero_masked(returns * weight, target)]
    if order is not None:
        aligned = [column.gather(-1, order) for column in aligned]
    responses, total_weight, total = (
        column.new_zeros(column.shape).index_add_(0, slot, column)[slot] for column in aligned
    )
    baseline = torch.where(responses > 1, total / (total_weight + BASELINE_EPS), 0.0)
    if order is not None:
        baseline = torch.zeros_like(baseline).scatter_(-1, order, baseline)
    return (
        finish(returns - baseline, response_mask, token_level_rewards),
        finish(returns, response_mask, token_level_rewards),
    )
