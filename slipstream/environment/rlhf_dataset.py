"""The old import path of `slipstream.data.rlhf_dataset`."""

import warnings

from slipstream.data.rlhf_dataset import *  # noqa: F403

warnings.warn(
    "slipstream.environment.rlhf_dataset has moved: import slipstream.data.rlhf_dataset",
    DeprecationWarning,
    stacklevel=2,
)
