"""Rollout correction: updates with tokens that were sampled from another distribution.

Importance weights, rejection and veto are for engines that differ from the trainer or lag behind
it. Support replay is for samplers that truncate their distribution (top-k, top-p, min-p).
"""

from slipstream.algorithms.correction.apply import (
    rollout_correction,
)
from slipstream.algorithms.correction.settings import PRESETS, RolloutCorrectionConfig
from slipstream.algorithms.correction.support_replay import (
    KeptIds,
    log_probs_on_support,
    support_log_mass,
)

__all__ = [
    "PRESETS",
    "KeptIds",
    "RolloutCorrectionConfig",
    "log_probs_on_support",
    "rollout_correction",
    "support_log_mass",
]
