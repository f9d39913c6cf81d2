"""GSPO: the ratio of whole sequences. Called through the registry."""

from __future__ import annotations

from torch import Tensor

from slipstream.algorithms.aggregation import LossAggMode
from slipstream.algorithms.losses.common import clipped_objective, sequence_mean, token_terms
from slipstream.algorithms.registry import LossMetrics, register_policy_loss
from slipstream.algorithms.settings import PolicyLossConfig

LOG_SEQUENCE_RATIO_BOUND = 10.0
"""Upper clamp of the sequence's log-ratio before exp."""


@register_policy_loss("gspo")
def gspo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str | LossAggMode = LossAggMode.TOKEN_MEAN,
    config: PolicyLossConfig | None = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, LossMetrics]:
    """max(-A s, -A clip(s, 1 - low, 1 + high)) with the ratio of the row's sequence

    s_t = exp(sg(mean_t k) + log_prob_t - sg(log_prob_t)), k = log_prob - old_log_prob:

    every token of a row has the row's ratio as value and its own log-prob's gradient. The
    log-ratio is clamped to at most 10. Always aggregated as `seq-mean-token-mean`, whatever
    `loss_agg_mode` says: the objective is a mean over sequences.

    Metrics as `vanilla`'s; `actor/ppo_kl` is the mean over tokens.

    Source: GSPO, https://arxiv.org/abs/2507.18071; the token-level form of its gradient.
    """
    terms = token_terms(
        old_log_prob, log_prob, advantages, response_mask, config, rollout_is_weights
    )
    of_row = sequence_mean(terms.raw_log_ratio.detach(), terms.mask).unsqueeze(-1)
    log_ratio = of_row + terms.log_prob - terms.log_prob.detach()
    ratio = log_ratio.clamp(max=LOG_SEQUENCE_RATIO_BOUND).exp()
    loss_mat, clipped = clipped_objective(ratio, terms.advantages, terms.config)
    return terms.aggregate(loss_mat, LossAggMode.SEQ_MEAN_TOKEN_MEAN), terms.metrics(clipped)
