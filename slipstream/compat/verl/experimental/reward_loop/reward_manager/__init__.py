"""verl's module `verl.experimental.reward_loop.reward_manager`."""

from slipstream.compat.managers import RewardManagerBase, get_reward_manager_cls, register

__all__ = ["RewardManagerBase", "get_reward_manager_cls", "register"]
