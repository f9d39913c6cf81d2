"""SAPO: a smooth gate instead of the clip."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.algorithms.aggregation import LossAggMode
from slipstream.algorithms.losses.common import token_terms
from slipstream.algorithms.registry import LossMetrics, register_policy_loss
from slipstream.algorithms.settings import PolicyLossConfig


@register_policy_loss("sapo")
def sapo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str | LossAggMode = LossAggMode.TOKEN_MEAN,
    config: PolicyLossConfig | None = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, LossMetrics]:
    """-A gate(r) with gate(r) = sigmoid(tau (r - 1)) 4 / tau.

    tau is `config.tau_pos` where A > 0, else `config.tau_neg`. At r = 1 the gate's slope is 1. The
    aggregation is always `seq-mean-token-mean`; `loss_agg_mode` is ignored. Nothing is clipped, so
    the clip fractions are 0.

    Source: SAPO, https://arxiv.org/abs/2511.20347.
    """
    terms = token_terms(
        old_log_prob, log_prob, advantages, response_mask, config, rollout_is_weights
    )
    ratio = terms.log_ratio.exp()
    # `masked_fill` keeps the ratio's dtype; `torch.where` of two numbers would be float32.
    tau = torch.full_like(ratio, terms.config.tau_neg)
    tau = tau.masked_fill(terms.advantages > 0, terms.config.tau_pos)
    gate = torch.sigmoid(tau * (ratio - 1)) * (4 / tau)
    loss_mat = -terms.advantages * gate
    return terms.aggregate(loss_mat, LossAggMode.SEQ_MEAN_TOKEN_MEAN), terms.metrics()
