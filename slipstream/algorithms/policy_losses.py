"""Policy-gradient losses over sampled tokens.

Registered functions have VERL's signature (see `registry.PolicyLossFn`) and take (B, T) tensors;
rows are responses, position t is a token with its log-prob, advantage and mask. Loss and metrics
are normalised by `config.normalizers`, so both add up over micro-batches. Called by training steps
through the registry. Knows nothing about models, nor where advantages come from.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.algorithms.aggregation import (
    LossAggMode,
    Normalizers,
    masked_mean,
    masked_sum,
    sum_loss,
    zero_masked,
)
from slipstream.algorithms.log_probs import token_log_probs
from slipstream.algorithms.registry import LossMetrics, register_policy_loss
from slipstream.algorithms.settings import PolicyLossConfig

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to +- this before exp, as everywhere in the field: e^20 is far outside
every clip range, and the exponential of more overflows."""


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

    `rollout_is_weights` (B, T) multiply the per-token loss. Metrics, over target tokens:
    `actor/pg_clipfrac` where the clip binds, `actor/pg_clipfrac_lower` where the dual clip does,
    `actor/ppo_kl` the mean of old_log_prob - log_prob.

    Source: PPO, https://arxiv.org/abs/1707.06347, eq. 7; dual clip:
    https://arxiv.org/abs/1912.09729; separate bounds: DAPO, https://arxiv.org/abs/2503.14476.
    GRPO's objective is the same one.
    """
    config = config or PolicyLossConfig()
    norm = _normalizers(config, response_mask)
    log_ratio = zero_masked(log_prob - old_log_prob, response_mask)
    log_ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    advantages = zero_masked(advantages, response_mask)
    ratio = log_ratio.exp()

    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(*config.clip_bounds)
    pessimistic = torch.maximum(unclipped, clipped)
    dual_bound = -advantages * config.clip_ratio_c
    negative = advantages < 0
    loss_mat = torch.where(negative, torch.minimum(pessimistic, dual_bound), pessimistic)
    loss = sum_loss(_weighted(loss_mat, rollout_is_weights), response_mask, loss_agg_mode, norm)

    with torch.no_grad():

        def share(values: Tensor) -> Tensor:
            return masked_sum(values.to(loss_mat.dtype), response_mask) / norm.num_tokens

        metrics: LossMetrics = {
            "actor/pg_clipfrac": share(clipped > unclipped),
            "actor/ppo_kl": share(-log_ratio),
            "actor/pg_clipfrac_lower": share((pessimistic > dual_bound) & negative),
        }
    return loss, metrics


@register_policy_loss("gpg")
@register_policy_loss("reinforce")
@register_policy_loss("policy_gradient")
def policy_gradient(
    old_log_prob: Tensor | None,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str | LossAggMode = LossAggMode.TOKEN_MEAN,
    config: PolicyLossConfig | None = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, LossMetrics]:
    """-A log_prob, optionally times `rollout_is_weights`. `old_log_prob` is not used.

    Source: REINFORCE, Williams 1992; as `gpg`: https://arxiv.org/abs/2504.02546.
    """
    config = config or PolicyLossConfig()
    loss_mat = _weighted(-advantages * log_prob, rollout_is_weights)
    norm = _normalizers(config, response_mask)
    return sum_loss(loss_mat, response_mask, loss_agg_mode, norm), {}


def grpo_loss(logits: Tensor, labels: Tensor, loss_mask: Tensor, advantages: Tensor) -> Tensor:
    """Mean over target tokens of -A log p(label): the simplified objective, without a ratio.

    `logits` (B, T, V) where position t predicts `labels[:, t]`; `labels` and `loss_mask` (B, T);
    `advantages` (B,), one per response.

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

    Shapes as in `grpo_loss`; `old_log_probs` (B, T).

    Source: PPO, https://arxiv.org/abs/1707.06347, eq. 7.

    Raises:
        ValueError: the mask is empty.
    """
    log_ratio = zero_masked(token_log_probs(logits, labels) - old_log_probs, loss_mask)
    ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    advantage = advantages.unsqueeze(-1)
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
    return masked_mean(torch.maximum(-advantage * ratio, -advantage * clipped), loss_mask)


def _normalizers(config: PolicyLossConfig, response_mask: Tensor) -> Normalizers:
    if config.normalizers is not None:
        return config.normalizers
    return Normalizers.from_mask(response_mask, horizon=config.loss_scale_factor)


def _weighted(loss_mat: Tensor, weights: Tensor | None) -> Tensor:
    return loss_mat if weights is None else loss_mat * weights.detach()
