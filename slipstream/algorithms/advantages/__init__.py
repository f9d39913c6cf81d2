"""Advantage estimators.

Registered functions have VERL's signature (`registry.AdvantageFn`) and take (B, T) tensors of a
whole batch. Rows with equal `index`, in any order, are a group: the responses to one prompt. In the
formulas s_i is the sum of row i's rewards. Batch preparation calls estimators through the registry,
with keywords.
"""

from slipstream.algorithms.advantages.distillation import on_policy_distillation
from slipstream.algorithms.advantages.gae import (
    compute_gae_advantage_return,
    estimate_advantages,
    gae,
)
from slipstream.algorithms.advantages.gdpo import gdpo
from slipstream.algorithms.advantages.gpg import gpg
from slipstream.algorithms.advantages.groups import GroupScores, group_scores
from slipstream.algorithms.advantages.grpo import grpo, grpo_passk
from slipstream.algorithms.advantages.opo import opo
from slipstream.algorithms.advantages.pf_ppo import pf_ppo_indices, pf_ppo_weights
from slipstream.algorithms.advantages.reinforce import (
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
)
from slipstream.algorithms.advantages.remax import remax
from slipstream.algorithms.advantages.rloo import rloo, rloo_vectorized
from slipstream.algorithms.advantages.token_baseline import (
    optimal_token_baseline,
    tir_optimal_token_baseline,
)
from slipstream.algorithms.advantages.whiten import masked_whiten

__all__ = [
    "GroupScores",
    "compute_gae_advantage_return",
    "estimate_advantages",
    "gae",
    "gdpo",
    "gpg",
    "group_scores",
    "grpo",
    "grpo_passk",
    "masked_whiten",
    "on_policy_distillation",
    "opo",
    "optimal_token_baseline",
    "pf_ppo_indices",
    "pf_ppo_weights",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "rloo_vectorized",
    "tir_optimal_token_baseline",
]
