"""Policy losses over sampled tokens, and the critic's value loss.

Registered functions have VERL's signature (`registry.PolicyLossFn`) and take (B, T) tensors: rows
are responses, and position t is a token with its log-prob, advantage and mask. Loss and metrics are
normalized by `config.normalizers`, so both add up over micro-batches. Training steps call losses
through the registry.
"""

from slipstream.algorithms.losses.bypass import bypass_mode
from slipstream.algorithms.losses.cispo import cispo
from slipstream.algorithms.losses.covariance import (
    clip_cov,
    kl_cov,
    select_clip_cov,
    select_kl_cov,
)
from slipstream.algorithms.losses.dppo import dppo_kl, dppo_tv
from slipstream.algorithms.losses.dro import dro
from slipstream.algorithms.losses.geo_mean import geo_mean
from slipstream.algorithms.losses.gpg import policy_gradient
from slipstream.algorithms.losses.gspo import gspo
from slipstream.algorithms.losses.ppo import compute_policy_loss, grpo_loss, ppo_loss, vanilla
from slipstream.algorithms.losses.sapo import sapo
from slipstream.algorithms.losses.tie_break import token_hashes
from slipstream.algorithms.losses.value import compute_value_loss, value_loss

__all__ = [
    "bypass_mode",
    "cispo",
    "clip_cov",
    "compute_policy_loss",
    "compute_value_loss",
    "dppo_kl",
    "dppo_tv",
    "dro",
    "geo_mean",
    "grpo_loss",
    "gspo",
    "kl_cov",
    "policy_gradient",
    "ppo_loss",
    "sapo",
    "select_clip_cov",
    "select_kl_cov",
    "token_hashes",
    "value_loss",
    "vanilla",
]
