"""verl's module `verl.trainer.ppo.core_algos`: estimators, losses and KL under verl's names.

The functions are those of `slipstream.algorithms`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipstream.algorithms import (
    AdaptiveKLController,
    AdvantageEstimator,
    FixedKLController,
    KLController,
    LossAggMode,
    PFPPOConfig,
    PolicyLossFn,
    agg_loss,
    bypass_mode,
    cispo,
    clip_cov,
    compute_gae_advantage_return,
    compute_policy_loss,
    compute_value_loss,
    dppo_kl,
    dppo_tv,
    gdpo,
    geo_mean,
    get_adv_estimator_fn,
    get_policy_loss_fn,
    gpg,
    grpo,
    grpo_passk,
    gspo,
    kl,
    kl_cov,
    kl_penalty,
    opo,
    optimal_token_baseline,
    pf_ppo_indices,
    policy_gradient,
    register_adv_est,
    register_policy_loss,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
    rloo_vectorized,
    sapo,
    tir_optimal_token_baseline,
    vanilla,
)
from slipstream.algorithms import get_kl_controller as make_kl_controller
from slipstream.compat.verl.utils.torch_functional import entropy_from_logits
from slipstream.rewards.data_proto import DataProto

__all__ = [
    "AdaptiveKLController",
    "AdvantageEstimator",
    "FixedKLController",
    "PolicyLossFn",
    "agg_loss",
    "compute_entropy_loss",
    "compute_gae_advantage_return",
    "compute_gdpo_outcome_advantage",
    "compute_gpg_outcome_advantage",
    "compute_grpo_outcome_advantage",
    "compute_grpo_passk_outcome_advantage",
    "compute_grpo_vectorized_outcome_advantage",
    "compute_multi_turn_optimal_token_baseline_advantage",
    "compute_opo_outcome_advantage",
    "compute_optimal_token_baseline_advantage",
    "compute_pf_ppo_reweight_data",
    "compute_policy_loss",
    "compute_policy_loss_bypass_mode",
    "compute_policy_loss_cispo",
    "compute_policy_loss_clip_cov",
    "compute_policy_loss_dppo_kl",
    "compute_policy_loss_dppo_tv",
    "compute_policy_loss_geo_mean",
    "compute_policy_loss_gpg",
    "compute_policy_loss_gspo",
    "compute_policy_loss_kl_cov",
    "compute_policy_loss_sapo",
    "compute_policy_loss_vanilla",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_remax_outcome_advantage",
    "compute_rewards",
    "compute_rloo_outcome_advantage",
    "compute_rloo_vectorized_outcome_advantage",
    "compute_value_loss",
    "get_adv_estimator_fn",
    "get_kl_controller",
    "get_policy_loss_fn",
    "kl_penalty",
    "kl_penalty_forward",
    "register_adv_est",
    "register_policy_loss",
]

compute_grpo_outcome_advantage = grpo
compute_grpo_vectorized_outcome_advantage = grpo
compute_grpo_passk_outcome_advantage = grpo_passk
compute_gdpo_outcome_advantage = gdpo
compute_reinforce_plus_plus_outcome_advantage = reinforce_plus_plus
compute_reinforce_plus_plus_baseline_outcome_advantage = reinforce_plus_plus_baseline
compute_rloo_outcome_advantage = rloo
compute_rloo_vectorized_outcome_advantage = rloo_vectorized
compute_opo_outcome_advantage = opo
compute_gpg_outcome_advantage = gpg
compute_remax_outcome_advantage = remax
compute_optimal_token_baseline_advantage = optimal_token_baseline
compute_multi_turn_optimal_token_baseline_advantage = tir_optimal_token_baseline

compute_policy_loss_vanilla = vanilla
compute_policy_loss_gspo = gspo
compute_policy_loss_sapo = sapo
compute_policy_loss_gpg = policy_gradient
compute_policy_loss_clip_cov = clip_cov
compute_policy_loss_kl_cov = kl_cov
compute_policy_loss_geo_mean = geo_mean
compute_policy_loss_cispo = cispo
compute_policy_loss_dppo_tv = dppo_tv
compute_policy_loss_dppo_kl = dppo_kl
compute_policy_loss_bypass_mode = bypass_mode


def get_kl_controller(kl_ctrl: Any) -> KLController:
    """Return the controller for `algorithm.kl_ctrl`, an object or a mapping.

    Its fields are `type` (fixed or adaptive), `kl_coef`, `target_kl` and `horizon`. Raises
    ValueError for another type, or if the target or the horizon is not positive.
    """

    def read(key: str) -> Any:
        return kl_ctrl.get(key) if hasattr(kl_ctrl, "get") else getattr(kl_ctrl, key, None)

    names = ("kl_coef", "target_kl", "horizon")
    given = {name: read(name) for name in names if read(name) is not None}
    return make_kl_controller(read("type"), **given)


def compute_rewards(
    token_level_scores: Tensor, old_log_prob: Tensor, ref_log_prob: Tensor, kl_ratio: float
) -> Tensor:
    """Return scores - `kl_ratio` (old_log_prob - ref_log_prob) (B, T)."""
    return token_level_scores - kl_ratio * (old_log_prob - ref_log_prob)


def compute_entropy_loss(
    logits: Tensor, response_mask: Tensor, loss_agg_mode: str | LossAggMode = "token-mean"
) -> Tensor:
    """Return the aggregated entropy of `logits` (B, T, V). Raises ValueError as `agg_loss` does."""
    return agg_loss(entropy_from_logits(logits), response_mask, loss_agg_mode)


def kl_penalty_forward(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Return the KL estimate of each token (B, T); a suffix `+` of the kind is ignored."""
    return kl.kl_penalty(logprob, ref_logprob, kl_penalty.removesuffix("+"))


def compute_pf_ppo_reweight_data(
    data: DataProto, reweight_method: str = "pow", weight_pow: float = 2.0
) -> DataProto:
    """Return rows drawn with replacement, with weights by their `token_level_scores` (PF-PPO).

    The draw uses torch's global generator. Raises ValueError for an unknown method.
    """
    config = PFPPOConfig(reweight_method=reweight_method, weight_pow=weight_pow)
    scores = data.batch["token_level_scores"].sum(-1)
    return data.select_idxs(pf_ppo_indices(scores, config, generator=torch.default_generator))
