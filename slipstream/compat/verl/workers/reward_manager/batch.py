"""verl's module `verl.workers.reward_manager.batch`."""

from slipstream.compat.managers import BatchRewardManager

__all__ = ["BatchRewardManager"]
