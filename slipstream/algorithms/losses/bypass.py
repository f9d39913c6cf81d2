"""Bypass mode: the rollout's policy is the old policy of the update.

The caller computes importance weights and rejection, and passes them as `rollout_is_weights` and as
zeros of `response_mask`.
"""

from __future__ import annotations

from torch import Tensor

from slipstream.algorithms.aggregation import LossAggMode
from slipstream.algorithms.losses.common import token_terms
from slipstream.algorithms.losses.ppo import vanilla
from slipstream.algorithms.registry import LossMetrics, register_policy_loss
from slipstream.algorithms.settings import PolicyLossConfig


@register_policy_loss("bypass_mode")
@register_policy_loss("rollout_correction")
def bypass_mode(
    old_log_prob: Tensor | None,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str | LossAggMode = LossAggMode.TOKEN_MEAN,
    config: PolicyLossConfig | None = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, LossMetrics]:
    """The loss of `policy_loss.loss_type`, with the rollout's log-probs as `old_log_prob`:

    - `ppo_clip`: `vanilla`. Its ratio is the importance weight, so `rollout_is_weights` must be
      None (VERL ignores them).
    - `reinforce`: -A log_prob w, where w = `rollout_is_weights` (None: 1) are weights of the
      current policy relative to the rollout's. Metric: `actor/ppo_kl`, the mean of old_log_prob -
      log_prob.

    Source: off-policy policy gradients, https://arxiv.org/abs/1205.4839; PPO,
    https://arxiv.org/abs/1707.06347.

    Raises:
        ValueError: there are no rollout log-probs, or there are weights with `ppo_clip`.
    """
    config = PolicyLossConfig.of(config, width=response_mask.shape[-1])
    if old_log_prob is None:
        raise ValueError(
            "bypass_mode needs the rollout's log-probs as old_log_prob, got None; use an engine "
            "that records them, as all values of actor_rollout_ref.rollout.name do"
        )
    if config.policy_loss.loss_type == "ppo_clip":
        if rollout_is_weights is not None:
            raise ValueError(
                "bypass_mode with loss_type=ppo_clip takes no rollout_is_weights, because its "
                "ratio is already the importance weight; set rollout_is=null or "
                "loss_type=reinforce"
            )
        return vanilla(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config)
    terms = token_terms(
        old_log_prob, log_prob, advantages, response_mask, config, rollout_is_weights
    )
    loss = terms.aggregate(-terms.advantages * terms.log_prob, loss_agg_mode)
    return loss, {"actor/ppo_kl": terms.share(-terms.log_ratio)}
