"""Checks of weight updates before an engine loads them."""

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
    """Return the tensors of an update, by name, after all of them have been checked.

    `module` gives the expected names and shapes; `dtype` is the dtype it computes in. Raises
    EngineError if a tensor is missing, unknown or duplicated, has a wrong shape, or is not finite
    in `dtype`. The error message begins with `what`.
    """
    tensors: dict[str, Tensor] = {}
    problems: list[str] = []
    for name, tensor in update.tensors():
        if name in tensors:
            problems.append(f"tensor {name} appears more than once")
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
    """Yield the tensors of an update bucket by bucket, each bucket checked as in `checked_tensors`.

    It is for single-copy weights, which each bucket overwrites. Raises EngineError at the first
    bucket that does not fit; earlier buckets may have been written by then.
    """
    missing = {name for name, _ in module.named_parameters()}
    for bucket in update.buckets:
        tensors = dict(bucket)
        problems = tensor_problems(module, tensors, dtype, some=True)
        problems += [
            f"tensor {name} appears more than once" for name in tensors if name not in missing
        ]
        if problems:
            raise EngineError(_partial_update_message(update, problems))
        missing -= tensors.keys()
        yield tensors
    if missing:
        problems = [f"tensor {name} is missing" for name in sorted(missing)]
        raise EngineError(_partial_update_message(update, problems))


def _partial_update_message(update: WeightUpdate, problems: list[str]) -> str:
    return (
        f"weight update to version {update.version} failed after a part of it was written; the "
        "engine now holds a mixture of old and new weights and must not generate: "
        f"{'; '.join(problems[:3])}"
    )
