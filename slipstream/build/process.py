"""Sets up the process of a run: imports user modules, sets the number of threads."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

import torch

from slipstream.build.policy import (
    thread_count,
)
from slipstream.config.schema import Config
from slipstream.errors import ConfigError
from slipstream.threads import usable_cores

if TYPE_CHECKING:
    pass


def import_external(config: Config) -> None:
    """Import `model.external_lib`, so that what it registers can be named.

    Raises ConfigError where it cannot be imported.
    """
    name = config.actor_rollout_ref.model.external_lib
    if name is None:
        return
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` has it: modules in the present folder
    try:
        importlib.import_module(name)
    except Exception as error:
        raise ConfigError(
            f"actor_rollout_ref.model.external_lib={name} cannot be imported "
            f"({type(error).__name__}: {error}); it takes a module's dotted name, and PYTHONPATH "
            "says where modules lie"
        ) from error


def set_threads(config: Config) -> None:
    """Apply `thread_count`; None: PyTorch's choice, one per core, but no more than this process may
    use."""
    given = thread_count(config)
    torch.set_num_threads(min(torch.get_num_threads(), usable_cores()) if given is None else given)
