"""verl's module `verl.trainer.main_ppo`: functions that create data sets and samplers.

The command is `python -m slipstream.main_ppo`.
"""

from slipstream.compat.data import create_rl_dataset, create_rl_sampler

__all__ = ["create_rl_dataset", "create_rl_sampler"]
