"""`python -m slipstream.main_fastrl`: takes the launch lines of FastRL's `main_fastrl`.

It holds the defaults of FastRL that differ from ours; everything else is in `config.launch`.
Training is `run.train.train`, and `--dry-run` is `preflight.dry_run`. Both are imported once the
settings have been checked.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from slipstream.config.launch import launch_training
from slipstream.config.mode import Mode
from slipstream.config.schema import Config
from slipstream.metrics.timeline import mark_command_start

FASTRL_DEFAULTS = {
    "algorithm.adv_estimator": "gae",
    "actor_rollout_ref.rollout.n": 1,
    "data.train_batch_size": 1024,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
    "trainer.total_epochs": 30,
    "trainer.max_actor_ckpt_to_keep": None,
    "speculative.enable": True,
}


def _train(config: Config, mode: Mode) -> int:
    from slipstream.run.train import train

    return train(config, mode)


def _dry_run(config: Config, mode: Mode) -> int:
    from slipstream.preflight.dry_run import dry_run

    return dry_run(config, mode)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one launch line (default: `sys.argv`) and return the exit code."""
    mark_command_start()
    return launch_training(
        argv,
        prog="python -m slipstream.main_fastrl",
        system="FastRL",
        system_defaults=FASTRL_DEFAULTS,
        train=_train,
        dry_run=_dry_run,
    )


if __name__ == "__main__":
    sys.exit(main())
