"""The old import path of `slipstream.data.data_buffer`."""

import warnings

from slipstream.data.data_buffer import *  # noqa: F403

warnings.warn(
    "slipstream.environment.data_buffer has moved: import slipstream.data.data_buffer",
    DeprecationWarning,
    stacklevel=2,
)
