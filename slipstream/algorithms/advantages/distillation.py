"""Learning from a teacher on one's own responses. Called through the registry."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from slipstream.algorithms.advantages.groups import as_given
from slipstream.algorithms.aggregation import zero_masked
from slipstream.algorithms.registry import AdvantageEstimator, AdvantageNeed, register_adv_est


@register_adv_est(
    AdvantageEstimator.ON_POLICY_DISTILLATION,
    needs=[AdvantageNeed.OLD_LOG_PROBS, AdvantageNeed.REF_LOG_PROBS],
)
def on_policy_distillation(
    *,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    old_log_probs: Tensor,
    ref_log_probs: Tensor,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """A_t = log q(t) - log p(t), the teacher's log-prob of each sampled token less the policy's:
    minus its estimate of the reverse KL. Rewards have no part in it. All (B, T).

    Source: on-policy distillation, https://arxiv.org/abs/2306.13649; per token without discount:
    https://thinkingmachines.ai/blog/on-policy-distillation.

    Raises:
        ValueError: shapes differ.
    """
    if not old_log_probs.shape == ref_log_probs.shape == response_mask.shape:
        raise ValueError(
            f"log-probs of policy and teacher must have the mask's shape "
            f"{tuple(response_mask.shape)}, got {tuple(old_log_probs.shape)} and "
            f"{tuple(ref_log_probs.shape)}"
        )
    gap = ref_log_probs.double() - old_log_probs.double()
    return as_given(zero_masked(gap, response_mask), token_level_rewards)
