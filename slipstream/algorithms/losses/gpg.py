"""The plain policy gradient without a ratio: REINFORCE and GPG."""

from __future__ import annotations

from torch import Tensor

from slipstream.algorithms.aggregation import LossAggMode
from slipstream.algorithms.losses.common import token_terms
from slipstream.algorithms.registry import LossMetrics, register_policy_loss
from slipstream.algorithms.settings import PolicyLossConfig


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
    terms = token_terms(None, log_prob, advantages, response_mask, config, rollout_is_weights)
    return terms.aggregate(-terms.advantages * terms.log_prob, loss_agg_mode), {}
