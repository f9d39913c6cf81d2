"""The old import path of `slipstream.data.samplers`."""

import warnings

from slipstream.data.samplers import *  # noqa: F403

warnings.warn(
    "slipstream.environment.samplers has moved: import slipstream.data.samplers",
    DeprecationWarning,
    stacklevel=2,
)
