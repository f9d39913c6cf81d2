"""verl's module `verl.workers.reward_manager.registry`."""

from slipstream.compat.managers import get_reward_manager_cls, register

__all__ = ["get_reward_manager_cls", "register"]
