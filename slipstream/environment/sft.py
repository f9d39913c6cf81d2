"""The old import path of `slipstream.data.sft`."""

import warnings

from slipstream.data.sft import *  # noqa: F403

warnings.warn(
    "slipstream.environment.sft has moved: import slipstream.data.sft",
    DeprecationWarning,
    stacklevel=2,
)
