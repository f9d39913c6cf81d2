"""The old import path of `slipstream.data.tokenizer`."""

import warnings

from slipstream.data.tokenizer import *  # noqa: F403

warnings.warn(
    "slipstream.environment.tokenizer has moved: import slipstream.data.tokenizer",
    DeprecationWarning,
    stacklevel=2,
)
