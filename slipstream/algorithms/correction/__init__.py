"""Rollout correction: for updates with tokens drawn from another law than the trained policy's.

Importance weights, rejection and veto for engines that differ from the trainer or lag behind it;
support replay for samplers that truncate their law.
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
