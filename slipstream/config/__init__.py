"""The configuration: all options, where their values come from, and rules between options.

`load_config` returns a checked configuration; the dataclass tree is in `schema`. This package does
not import torch.
"""

from __future__ import annotations

from slipstream.config.hardware import Hardware, detect_hardware
from slipstream.config.load import (
    CONFIG_FILE,
    RESUMABLE_KEYS,
    diff,
    load_config,
    to_yaml,
)
from slipstream.config.mode import Mode, resolve_mode
from slipstream.config.schema import Config
from slipstream.config.tree import to_dict
from slipstream.config.validate import validate

__all__ = [
    "CONFIG_FILE",
    "RESUMABLE_KEYS",
    "Config",
    "Hardware",
    "Mode",
    "detect_hardware",
    "diff",
    "load_config",
    "resolve_mode",
    "to_dict",
    "to_yaml",
    "validate",
]
