"""verl's module `verl.workers.reward_manager.prime`."""

from slipstream.compat.managers import PrimeRewardManager

__all__ = ["PrimeRewardManager"]
