"""DRO: a quadratic penalty on the log-ratio instead of a clip."""

from __future__ import annotations

from torch import Tensor

from slipstream.algorithms.aggregation import LossAggMode
from slipstream.algorithms.losses.common import token_terms
from slipstream.algorithms.registry import LossMetrics, register_policy_loss
from slipstream.algorithms.settings import PolicyLossConfig


@register_policy_loss("dro")
def dro(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str | LossAggMode = LossAggMode.TOKEN_MEAN,
    config: PolicyLossConfig | None = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, LossMetrics]:
    """-(A log_prob - beta / 2 k^2), k = log_prob - old_log_prob, beta = `policy_loss.dro_beta`.

    Metric: `actor/ppo_kl`. Nothing is clipped, so the clip fractions are 0.

    Source: DRO, https://arxiv.org/abs/2405.19107, with log-probs of tokens instead of responses.

    Raises:
        ValueError: `dro_beta` is not set.
    """
    terms = token_terms(
        old_log_prob, log_prob, advantages, response_mask, config, rollout_is_weights
    )
    beta = terms.config.policy_loss.dro_beta
    if beta is None:
        raise ValueError(
            "loss_mode=dro needs policy_loss.dro_beta > 0, the coefficient of the squared "
            "log-ratio, got None"
        )
    penalty = 0.5 * beta * terms.raw_log_ratio.square()
    loss_mat = -(terms.advantages * terms.log_prob - penalty)
    return terms.aggregate(loss_mat, loss_agg_mode), terms.metrics()
