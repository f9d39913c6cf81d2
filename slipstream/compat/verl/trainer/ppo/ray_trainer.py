"""verl's module `verl.trainer.ppo.ray_trainer`."""

from slipstream.compat.algorithms import (
    AdvantageEstimator,
    apply_kl_penalty,
    compute_advantage,
    compute_response_mask,
)
from slipstream.compat.trainer import RayPPOTrainer

__all__ = [
    "AdvantageEstimator",
    "RayPPOTrainer",
    "apply_kl_penalty",
    "compute_advantage",
    "compute_response_mask",
]
