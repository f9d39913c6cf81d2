"""`python -m slipstream.main_fastrl`: takes the launch lines of FastRL's `main_fastrl`.

It holds the defaults of FastRL that differ from ours; everything else is in `launchers`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from slipstream.launchers.command import launch_rl

FASTRL_DEFAULTS = {
    "algorithm.adv_estimator": "gae",
    "actor_rollout_ref.rollout.n": 1,
    "data.train_batch_size": 1024,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
    "trainer.total_epochs": 30,
    "trainer.max_actor_ckpt_to_keep": None,
    "speculative.enable": True,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one launch line (default: `sys.argv`) and return the exit code."""
    prog = "python -m slipstream.main_fastrl"
    return launch_rl(argv, prog=prog, system="FastRL", defaults=FASTRL_DEFAULTS)


if __name__ == "__main__":
    sys.exit(main())
