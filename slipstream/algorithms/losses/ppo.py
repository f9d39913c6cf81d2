"""PPO's clipped objective: the registered loss, and two functional forms over logits."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.algorithms.aggregation import LossAggMode, masked_mean, zero_masked
from slipstream.algorithms.log_probs import token_log_probs
from slipstream.algorithms.losses.common import LOG_RATIO_BOUND, clipped_objective, token_terms
from slipstream.algorithms.registry import LossMetrics, register_policy_loss
from slipstream.algorithms.settings import PolicyLossConfig


@register_policy_loss("vanilla")
@register_policy_loss("ppo")
@register_policy_loss("grpo")
def vanilla(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str | LossAggMode = LossAggMode.TOKEN_MEAN,
    config: PolicyLossConfig | None = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, LossMetrics]:
    """PPO's clipped objective with a dual clip. With r = exp(log_prob - old_log_prob):

    C = max(-A r, -A clip(r, 1 - low, 1 + high)); where A < 0: min(C, -A clip_ratio_c).

    `rollout_is_weights` (B, T) multiply the per-token loss. Metrics over target tokens:
    `actor/pg_clipfrac`, the share of clipped tokens; `actor/pg_clipfrac_lower`, the share of tokens
    with a dual clip; `actor/ppo_kl`, the mean of old_log_prob - log_prob.

    Source: PPO, https://arxiv.org/abs/1707.06347, eq. 7; dual clip:
    https://arxiv.org/abs/1912.09729; separate bounds: DAPO, https://arxiv.org/abs/2503.14476.
    GRPO has the same objective.
    """
    terms = token_terms(
        old_log_prob, log_prob, advantages, response_mask, config, rollout_is_weights
    )
    pessimistic, clipped = clipped_objective(terms.log_ratio.exp(), terms.advantages, terms.config)
    dual_bound = -terms.advantages * terms.config.clip_ratio_c
    negative = terms.advantages < 0
    loss_mat = torch.where(negative, torch.minimum(pessimistic, dual_bound), pessimistic)
    metrics = terms.metrics(clipped, (pessimistic > dual_bound) & negative)
    return terms.aggregate(loss_mat, loss_agg_mode), metrics


def compute_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cliprange: float | None = None,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    clip_ratio_c: float = 3.0,
    loss_agg_mode: str | LossAggMode = LossAggMode.TOKEN_MEAN,
) -> tuple[Tensor, Tensor | float, Tensor | float, Tensor | float]:
    """`vanilla` with the signature of older VERL versions.

    Returns (loss, pg_clipfrac, ppo_kl, pg_clipfrac_lower). The rows must be the whole mini-batch. A
    bound of None is `cliprange`.

    Raises:
        ValueError: the clip range is missing or invalid, or there is no target token.
    """
    if cliprange is None and (cliprange_low is None or cliprange_high is None):
        raise ValueError("compute_policy_loss needs cliprange, or cliprange_low and cliprange_high")
    config = PolicyLossConfig(
        clip_ratio=0.0 if cliprange is None else cliprange,
        clip_ratio_low=cliprange_low,
        clip_ratio_high=cliprange_high,
        clip_ratio_c=clip_ratio_c,
    )
    loss, metrics = vanilla(
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config
    )
    return (
        loss,
        metrics["actor/pg_clipfrac"],
        metrics["actor/ppo_kl"],
        metrics["actor/pg_clipfrac_lower"],
    )


def grpo_loss(logits: Tensor, labels: Tensor, loss_mask: Tensor, advantages: Tensor) -> Tensor:
    """Mean over target tokens of -A log p(label), the simplified objective without a ratio.

    `logits` are (B, T, V), and position t predicts `labels[:, t]`. `labels` and `loss_mask` are
    (B, T), `advantages` (B,), one per response.

    Raises:
        ValueError: the mask is empty.
    """
    log_prob = token_log_probs(logits, labels)
    return masked_mean(-advantages.unsqueeze(-1) * log_prob, loss_mask)


def ppo_loss(
    logits: Tensor,
    labels: Tensor,
    loss_mask: Tensor,
    advantages: Tensor,
    old_log_probs: Tensor,
    clip_range: float = 0.2,
) -> Tensor:
    """Mean over target tokens of PPO's clipped objective, without a dual clip.

    Shapes are as in `grpo_loss`; `old_log_probs` are (B, T).

    Source: PPO, https://arxiv.org/abs/1707.06347, eq. 7.

    Raises:
        ValueError: the mask is empty.
    """
    log_ratio = zero_masked(token_log_probs(logits, labels) - old_log_probs, loss_mask)
    ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    advantage = advantages.unsqueeze(-1)
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
    return masked_mean(torch.maximum(-advantage * ratio, -advantage * clipped), loss_mask)
