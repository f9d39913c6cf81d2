"""`python -m slipstream.fsdp_sft_trainer`: takes the launch lines of VERL's `fsdp_sft_trainer`.

It holds the defaults of VERL that differ from ours; everything else is in `run.sft_launch`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from slipstream.config.mode import Mode
from slipstream.config.schema import Config
from slipstream.metrics.timeline import mark_command_start
from slipstream.run.sft_launch import launch_sft

VERL_DEFAULTS = {
    "sft.optim.betas": (0.9, 0.95),
    "sft.optim.lr_warmup_steps_ratio": 0.1,
    "sft.optim.lr_scheduler_type": "cosine",
    "trainer.max_actor_ckpt_to_keep": None,
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
    return launch_sft(
        argv,
        prog="python -m slipstream.fsdp_sft_trainer",
        defaults=VERL_DEFAULTS,
        train=_train,
        dry_run=_dry_run,
    )


if __name__ == "__main__":
    sys.exit(main())
