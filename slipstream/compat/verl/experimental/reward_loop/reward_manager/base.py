"""verl's module `verl.experimental.reward_loop.reward_manager.base`."""

from slipstream.compat.managers import RewardManagerBase

__all__ = ["RewardManagerBase"]
