"""verl's module `verl.workers.reward_manager.abstract`."""

from slipstream.compat.managers import AbstractRewardManager

__all__ = ["AbstractRewardManager"]
