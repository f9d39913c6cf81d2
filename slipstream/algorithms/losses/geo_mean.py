"""GMPO: the geometric mean of the ratios of a sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.algorithms.aggregation import LossAggMode
from slipstream.algorithms.losses.common import sequence_mean, token_terms
from slipstream.algorithms.registry import LossMetrics, register_policy_loss
from slipstream.algorithms.settings import PolicyLossConfig

SMALLEST_WEIGHT = 1e-10
"""The value that an importance weight of 0 has in the geometric mean of a row."""


@register_policy_loss("geo_mean")
def geo_mean(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str | LossAggMode = LossAggMode.TOKEN_MEAN,
    config: PolicyLossConfig | None = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, LossMetrics]:
    """Per row: -mean_t(A) exp(mean_t k'), with the one-sided clip in log space

    k' = sgn(A) min(sgn(A) k, sgn(A) clamp(k, -low, high)), k = log_prob - old_log_prob.

    The loss is the mean over rows with target tokens; `loss_agg_mode` is ignored. (VERL's mean is
    over the rows of a micro-batch, including empty ones.) A row's loss is multiplied by the
    geometric mean of its `rollout_is_weights`, where a weight of 0 counts as 1e-10. Metrics:
    `actor/pg_clipfrac` and `actor/pg_clipfrac_lower`, the shares of tokens with k outside its
    bounds and A > 0 or A < 0.

    Source: GMPO, https://arxiv.org/abs/2507.20673.
    """
    terms = token_terms(
        old_log_prob, log_prob, advantages, response_mask, config, rollout_is_weights
    )
    low, high = terms.config.clip_distances
    k, sign = terms.log_ratio, terms.advantages.sign()
    clamped = k.clamp(-low, high)
    pessimistic = sign * torch.minimum(sign * k, sign * clamped)
    loss_of_row = -sequence_mean(terms.advantages, terms.mask) * (
        sequence_mean(pessimistic, terms.mask).exp()
    )
    if terms.weights is not None:
        log_weights = terms.weights.clamp(min=SMALLEST_WEIGHT).log()
        loss_of_row = loss_of_row * sequence_mean(log_weights, terms.mask).exp()
    # A row without target tokens has advantage 0, so its loss is 0.
    loss = loss_of_row.sum() / terms.norm.num_sequences
    outside = k != clamped
    return loss, terms.metrics(outside & (sign > 0), outside & (sign < 0))
