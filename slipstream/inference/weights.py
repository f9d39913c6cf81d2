"""Weights on their way into an engine: checked as a whole before any is used."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from slipstream.errors import EngineError
from slipstream.models.hf_io import tensor_problems
from slipstream.types import WeightUpdate


def checked_tensors(
    module: nn.Module, update: WeightUpdate, dtype: torch.dtype, *, what: str
) -> dict[str, Tensor]:
    """The tensors of an update that fits `module`, which computes in `dtype`. Raises EngineError,
    beginning with `what`, where they are missing, extra, twice there, misshapen, or not finite in
    that dtype."""
    tensors: dict[str, Tensor] = {}
    problems: list[str] = []
    for name, tensor in update.tensors():
        if name in tensors:
            problems.append(f"tensor {name} comes more than once")
        tensors[name] = tensor
    problems += tensor_problems(module, tensors, dtype)
    if problems:
        raise EngineError(
            f"{what} to version {update.version} refused, the weights in use stay: "
            + "; ".join(problems[:3])
        )
    return tensors
