"""CISPO: clipped importance weights without gradient."""

from __future__ import annotations

from torch import Tensor

from slipstream.algorithms.aggregation import LossAggMode
from slipstream.algorithms.losses.common import token_terms
from slipstream.algorithms.registry import LossMetrics, register_policy_loss
from slipstream.algorithms.settings import PolicyLossConfig


@register_policy_loss("cispo")
def cispo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str | LossAggMode = LossAggMode.TOKEN_MEAN,
    config: PolicyLossConfig | None = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, LossMetrics]:
    """-sg(clip(r, 1 - low, 1 + high)) A log_prob, r = exp(log_prob - old_log_prob).

    Clipped tokens keep their gradient, with a bounded weight. With `clip_ratio_low` of 1 or more
    there is no lower bound, as in the paper. Metrics: `actor/pg_clipfrac`, the share of tokens with
    r outside its bounds, and `actor/ppo_kl`.

    Source: CISPO (MiniMax-M1), https://arxiv.org/abs/2506.13585.
    """
    terms = token_terms(
        old_log_prob, log_prob, advantages, response_mask, config, rollout_is_weights
    )
    ratio = terms.log_ratio.detach().exp()
    clipped = ratio.clamp(*terms.config.clip_bounds)
    loss_mat = -clipped * terms.advantages * terms.log_prob
    return terms.aggregate(loss_mat, loss_agg_mode), terms.metrics(ratio != clipped)
