"""verl's module `verl.workers.reward_manager.naive`."""

from slipstream.compat.managers import NaiveRewardManager

__all__ = ["NaiveRewardManager"]
