"""GSPO: the probability ratio of whole sequences."""

from __future__ import annotations

from torch import Tensor

from slipstream.algorithms.aggregation import LossAggMode
from slipstream.algorithms.losses.common import clipped_objective, sequence_mean, token_terms
from slipstream.algorithms.registry import LossMetrics, register_policy_loss
from slipstream.algorithms.settings import PolicyLossConfig

LOG_SEQUENCE_RATIO_BOUND = 10.0
"""Upper bound of a sequence's log-ratio before exp."""


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

    Each token has the value of the row's ratio and the gradient of its own log-prob. The log-ratio
    is clamped to at most 10. The aggregation is `seq-mean-token-mean`, because the objective is a
    mean over sequences. With `config.policy_loss.gspo_uses_loss_agg_mode` it is `loss_agg_mode`, as
    in VERL 0.9.1.

    Metrics are those of `vanilla`; `actor/ppo_kl` is the mean over tokens.

    Source: GSPO, https://arxiv.org/abs/2507.18071; the token-level form of its gradient.
    """
    terms = token_terms(
        old_log_prob, log_prob, advantages, response_mask, config, rollout_is_weights
    )
    of_row = sequence_mean(terms.raw_log_ratio.detach(), terms.mask).unsqueeze(-1)
    log_ratio = of_row + terms.log_prob - terms.log_prob.detach()
    ratio = log_ratio.clamp(max=LOG_SEQUENCE_RATIO_BOUND).exp()
    loss_mat, clipped = clipped_objective(ratio, terms.advantages, terms.config)
    given = terms.config.policy_loss.gspo_uses_loss_agg_mode
    mode = loss_agg_mode if given else LossAggMode.SEQ_MEAN_TOKEN_MEAN
    return terms.aggregate(loss_mat, mode), terms.metrics(clipped)
