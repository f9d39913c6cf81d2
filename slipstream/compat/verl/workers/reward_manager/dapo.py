"""verl's module `verl.workers.reward_manager.dapo`."""

from slipstream.compat.managers import DAPORewardManager

__all__ = ["DAPORewardManager"]
