"""The configuration: every option, its sources, and the rules between options. Never torch.

`load_config` is the way in; the dataclass tree is in `schema`.
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
