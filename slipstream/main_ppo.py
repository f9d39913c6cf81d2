"""`python -m slipstream.main_ppo`: takes the launch lines of VERL's `main_ppo`.

It holds the defaults of VERL that differ from ours; everything else is in `launchers`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from slipstream.launchers.command import launch_rl

VERL_DEFAULTS = {
    "algorithm.adv_estimator": "gae",
    "actor_rollout_ref.rollout.n": 1,
    "data.train_batch_size": 1024,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
    "trainer.total_epochs": 30,
    "trainer.max_actor_ckpt_to_keep": None,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one launch line (default: `sys.argv`) and return the exit code."""
    prog = "python -m slipstream.main_ppo"
    return launch_rl(argv, prog=prog, system="VERL", defaults=VERL_DEFAULTS)


if __name__ == "__main__":
    sys.exit(main())
