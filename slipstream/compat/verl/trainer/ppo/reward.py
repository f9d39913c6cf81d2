"""verl's module `verl.trainer.ppo.reward`."""

from slipstream.compat.rewards import (
    compute_reward,
    compute_reward_async,
    get_custom_reward_fn,
    load_reward_manager,
)

__all__ = [
    "compute_reward",
    "compute_reward_async",
    "get_custom_reward_fn",
    "load_reward_manager",
]
