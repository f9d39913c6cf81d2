"""ALGORITHM: advantages, policy losses, KL, entropy and the reductions they share.

Pure functions over tensors, found by name in two registries. Imports torch and nothing of ours.
"""

from slipstream.algorithms.advantages import (
    GroupScores,
    gpg,
    group_scores,
    grpo,
    rloo,
    rloo_vectorized,
)
from slipstream.algorithms.aggregation import (
    LossAggMode,
    Normalizers,
    agg_loss,
    masked_mean,
    masked_sum,
    sum_loss,
    zero_masked,
)
from slipstream.algorithms.correction import (
    KeptIds,
    RolloutCorrectionConfig,
    compute_rollout_correction_and_rejection_mask,
    log_probs_on_support,
    rollout_correction,
    support_log_mass,
    support_log_mass_from_logits,
)
from slipstream.algorithms.entropy import entropy_from_logits, entropy_loss
from slipstream.algorithms.full_kl import chunked_full_kl
from slipstream.algorithms.kl import (
    AdaptiveKLController,
    FixedKLController,
    KLController,
    apply_kl_penalty,
    get_kl_controller,
    kl_penalty,
)
from slipstream.algorithms.log_probs import (
    chunked_sum_pi_squared,
    chunked_token_log_probs,
    token_log_probs,
)
from slipstream.algorithms.policy_losses import grpo_loss, policy_gradient, ppo_loss, vanilla
from slipstream.algorithms.registry import (
    AdvantageEstimator,
    AdvantageFn,
    LossMetrics,
    PolicyLossFn,
    RegistryError,
    adv_estimator_names,
    get_adv_estimator_fn,
    get_policy_loss_fn,
    policy_loss_names,
    register_adv_est,
    register_policy_loss,
)
from slipstream.algorithms.settings import AdvantageConfig, PolicyLossConfig

__all__ = [
    "AdaptiveKLController",
    "AdvantageConfig",
    "AdvantageEstimator",
    "AdvantageFn",
    "FixedKLController",
    "GroupScores",
    "KLController",
    "KeptIds",
    "LossAggMode",
    "LossMetrics",
    "Normalizers",
    "PolicyLossConfig",
    "PolicyLossFn",
    "RegistryError",
    "RolloutCorrectionConfig",
    "adv_estimator_names",
    "agg_loss",
    "apply_kl_penalty",
    "chunked_full_kl",
    "chunked_sum_pi_squared",
    "chunked_token_log_probs",
    "compute_rollout_correction_and_rejection_mask",
    "entropy_from_logits",
    "entropy_loss",
    "get_adv_estimator_fn",
    "get_kl_controller",
    "get_policy_loss_fn",
    "gpg",
    "group_scores",
    "grpo",
    "grpo_loss",
    "kl_penalty",
    "log_probs_on_support",
    "masked_mean",
    "masked_sum",
    "policy_gradient",
    "policy_loss_names",
    "ppo_loss",
    "register_adv_est",
    "register_policy_loss",
    "rloo",
    "rloo_vectorized",
    "rollout_correction",
    "sum_loss",
    "support_log_mass",
    "support_log_mass_from_logits",
    "token_log_probs",
    "vanilla",
    "zero_masked",
]
