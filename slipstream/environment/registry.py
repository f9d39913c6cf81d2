"""The old import path of `slipstream.data.registry`."""

import warnings

from slipstream.data.registry import *  # noqa: F403

warnings.warn(
    "slipstream.environment.registry has moved: import slipstream.data.registry",
    DeprecationWarning,
    stacklevel=2,
)
