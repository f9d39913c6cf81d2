"""Weights on their way into an engine: checked as a whole before any is used."""

from __future__ import annotations

from collections.abc import Iterator

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


def checked_buckets(
    module: nn.Module, update: WeightUpdate, dtype: torch.dtype
) -> Iterator[dict[str, Tensor]]:
    """The same, a bucket at a time, for weights that are written over as they come. Raises
    EngineError where one does not fit, and some are new by then."""
    missing = {name for name, _ in module.named_parameters()}
    for bucket in update.buckets:
        tensors = dict(bucket)
        problems = tensor_problems(module, tensors, dtype, some=True)
        problems += [
            f"tensor {name} comes more than once" for name in tensors if name not in missing
        ]
        if problems:
            raise EngineError(_mixed(update, problems))
        missing -= tensors.keys()
        yield tensors
    if missing:
        raise EngineError(_mixed(update, [f"tensor {name} is missing" for name in sorted(missing)]))


def _mixed(update: WeightUpdate, problems: list[str]) -> str:
    return (
        f"weight update to version {update.version} failed when a part of it was in use, and "
        f"generating cannot go on: {'; '.join(problems[:3])}"
    )
