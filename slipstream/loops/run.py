"""The old import path of `slipstream.run.train`."""

import warnings

from slipstream.run.train import *  # noqa: F403

warnings.warn(
    "slipstream.loops.run has moved: import slipstream.run.train",
    DeprecationWarning,
    stacklevel=2,
)
