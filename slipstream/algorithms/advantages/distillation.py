"""On-policy distillation: advantages that move the policy towards a teacher on its own samples."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from slipstream.algorithms.advantages.groups import (
    check_finite,
    check_keywords,
    check_shapes,
    finish,
    required,
)
from slipstream.algorithms.registry import AdvantageEstimator, AdvantageNeed, register_adv_est


@register_adv_est(
    AdvantageEstimator.ON_POLICY_DISTILLATION,
    needs=[AdvantageNeed.OLD_LOG_PROBS, AdvantageNeed.REF_LOG_PROBS],
)
def on_policy_distillation(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    old_log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    """A_t = log pi_ref(y_t) - log pi_old(y_t), in nats. This is minus the sampled reverse KL of
    each token to the reference model, the teacher. The returns equal A.

    `old_log_probs` and `ref_log_probs` are (B, T). `token_level_rewards` only sets the dtype of the
    result. Shapes are as in `AdvantageFn`.

    Source: on-policy distillation (GKD), https://arxiv.org/abs/2306.13649, with reverse KL as a
    reward per token, as in MiniLLM, https://arxiv.org/abs/2306.08543.

    Raises:
        ValueError: log-probs are missing or not finite, or shapes differ.
    """
    check_keywords("on_policy_distillation", more)
    name = "on_policy_distillation"
    columns = {
        "old_log_probs": required(name, AdvantageNeed.OLD_LOG_PROBS, old_log_probs),
        "ref_log_probs": required(name, AdvantageNeed.REF_LOG_PROBS, ref_log_probs),
    }
    check_shapes(token_level_rewards=token_level_rewards, response_mask=response_mask, **columns)
    check_finite(response_mask, **columns)
    gap = columns["ref_log_probs"].double() - columns["old_log_probs"].double()
    advantages = finish(gap, response_mask, token_level_rewards)
    return advantages, advantages.clone()
