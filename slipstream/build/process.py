"""Sets up the process of a run: imports user modules, sets the number of threads."""

from __future__ import annotations

import importlib
import sys

import torch

from slipstream.build.policy import (
    thread_count,
)
from slipstream.config.engines import engine_entry, selected_engine
from slipstream.config.hardware import detect_hardware
from slipstream.config.load import raise_problems
from slipstream.config.schema import Config
from slipstream.config.validate import validate
from slipstream.errors import ConfigError
from slipstream.threads import usable_cores
from slipstream.user_code import imported

MAX_THREADS = 1_024
"""Maximum number of threads of PyTorch in a process. Each of them has a stack of several MB."""


def import_external(config: Config) -> None:
    """Import `model.external_lib`, so that what it registers can be named.

    An engine that this registers was unknown when the configuration was loaded, so the rules
    between options are applied again.

    Raises ConfigError if the module cannot be imported, if it does not register the engine that
    `rollout.name` selects, and for settings that this engine does not have.
    """
    name = config.actor_rollout_ref.model.external_lib
    if name is None:
        return
    known = selected_engine(config) is not None
    if "" not in sys.path:
        sys.path.insert(0, "")  # modules in the current folder, as with `python -m`
    imported(
        lambda: importlib.import_module(name),
        f"actor_rollout_ref.model.external_lib={name}",
        "it must be the dotted name of a module in a folder of PYTHONPATH",
    )
    if not known:
        engine_entry(config.actor_rollout_ref.rollout.name)
        raise_problems(validate(config, detect_hardware(), complete=False))


def set_threads(config: Config) -> None:
    """Set the number of threads to `thread_count`. If that is None, use PyTorch's default, one per
    core, limited to the cores that this process may use."""
    given = thread_count(config)
    if given is not None and given > MAX_THREADS:
        raise ConfigError(
            f"trainer.num_threads={given} is more than {MAX_THREADS}; set it to the number of "
            "cores, or to null"
        )
    torch.set_num_threads(min(torch.get_num_threads(), usable_cores()) if given is None else given)
