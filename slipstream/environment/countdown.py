"""The old import path of `slipstream.data.countdown`."""

import warnings

from slipstream.data.countdown import *  # noqa: F403

warnings.warn(
    "slipstream.environment.countdown has moved: import slipstream.data.countdown",
    DeprecationWarning,
    stacklevel=2,
)
