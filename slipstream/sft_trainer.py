"""`python -m slipstream.sft_trainer`: takes the launch lines of VERL's `sft_trainer`.

It holds the defaults of VERL that differ from ours; everything else is in `launchers`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from slipstream.launchers.sft import launch_sft

VERL_DEFAULTS = {
    "sft.optim.lr": 1e-3,
    "trainer.max_actor_ckpt_to_keep": None,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one launch line (default: `sys.argv`) and return the exit code."""
    return launch_sft(argv, prog="python -m slipstream.sft_trainer", defaults=VERL_DEFAULTS)


if __name__ == "__main__":
    sys.exit(main())
