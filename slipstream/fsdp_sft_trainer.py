"""`python -m slipstream.fsdp_sft_trainer`: takes the launch lines of VERL's `fsdp_sft_trainer`.

It holds the defaults of VERL that differ from ours; everything else is in `launchers`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from slipstream.launchers.sft import launch_sft

VERL_DEFAULTS = {
    "sft.optim.betas": (0.9, 0.95),
    "sft.optim.lr_warmup_steps_ratio": 0.1,
    "sft.optim.lr_scheduler_type": "cosine",
    "trainer.max_actor_ckpt_to_keep": None,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one launch line (default: `sys.argv`) and return the exit code."""
    return launch_sft(argv, prog="python -m slipstream.fsdp_sft_trainer", defaults=VERL_DEFAULTS)


if __name__ == "__main__":
    sys.exit(main())
