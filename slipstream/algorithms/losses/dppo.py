"""DPPO: a trust region on the divergence of probabilities instead of their ratio.

The divergence is between two Bernoulli distributions: the sampled token against all others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.algorithms.aggregation import LossAggMode
from slipstream.algorithms.losses.common import TokenTerms, token_terms
from slipstream.algorithms.registry import LossMetrics, register_policy_loss
from slipstream.algorithms.settings import PolicyLossConfig

PROBABILITY_EPS = 1e-8
"""Keeps log(1 - p) finite for tokens of probability 1."""


@register_policy_loss("dppo_tv")
def dppo_tv(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str | LossAggMode = LossAggMode.TOKEN_MEAN,
    config: PolicyLossConfig | None = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, LossMetrics]:
    """-A sg(min(r, clip_ratio_c)) log_prob for tokens inside the trust region, else 0.

    With p = exp(log_prob) and q = exp(old_log_prob), a token is inside if p - q <= high where A >
    0, and if p - q >= -low elsewhere; low and high are `clip_ratio_low` and `clip_ratio_high`.
    Metrics: `actor/pg_clipfrac`, the share of tokens outside; `actor/pg_clipfrac_lower`, the share
    of tokens inside with a truncated ratio; `actor/ppo_kl`.

    Source: DPPO, https://arxiv.org/abs/2602.04879, binary total variation.
    """
    terms = token_terms(
        old_log_prob, log_prob, advantages, response_mask, config, rollout_is_weights
    )
    low, high = terms.config.clip_distances
    change = terms.log_prob.detach().exp() - terms.old_log_prob.exp()
    inside = torch.where(terms.advantages > 0, change <= high, change >= -low)
    return _trust_region_loss(terms, inside, loss_agg_mode)


@register_policy_loss("dppo_kl")
def dppo_kl(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str | LossAggMode = LossAggMode.TOKEN_MEAN,
    config: PolicyLossConfig | None = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, LossMetrics]:
    """`dppo_tv` with the binary KL as divergence.

    D = q (log q - log p) + (1 - q) log((1 - q) / (1 - p)). A token is inside if D <= high or p <= q
    where A > 0, and if D <= low or p >= q elsewhere. So tokens that move back towards the old
    policy are inside.

    Source: DPPO, https://arxiv.org/abs/2602.04879, binary KL.
    """
    terms = token_terms(
        old_log_prob, log_prob, advantages, response_mask, config, rollout_is_weights
    )
    low, high = terms.config.clip_distances
    p, q = terms.log_prob.detach().exp(), terms.old_log_prob.exp()
    rest = ((1 - q + PROBABILITY_EPS) / (1 - p + PROBABILITY_EPS)).log()
    divergence = -q * terms.raw_log_ratio.detach() + (1 - q) * rest
    inside = torch.where(
        terms.advantages > 0, (divergence <= high) | (p <= q), (divergence <= low) | (p >= q)
    )
    return _trust_region_loss(terms, inside, loss_agg_mode)


def _trust_region_loss(
    terms: TokenTerms, inside: Tensor, mode: str | LossAggMode
) -> tuple[Tensor, LossMetrics]:
    ratio = terms.log_ratio.detach().exp()
    bound = terms.config.clip_ratio_c
    loss_mat = torch.where(inside, -terms.advantages * ratio.clamp(max=bound) * terms.log_prob, 0.0)
    return terms.aggregate(loss_mat, mode), terms.metrics(~inside, inside & (ratio > bound))
