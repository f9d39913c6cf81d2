"""Copy new weights into the memory of old ones, so that recorded addresses stay valid.

CUDA graphs store the addresses of weights. The engine and the drafters use this if they record
graphs (`inference.engine.recorder`).
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def copy_in_place(old: Any, new: Any) -> None:
    """Copy all tensors of the packed weights `new` into the tensors of `old`, which match them.

    Both are tensors, sequences or dataclasses of the same structure.
    """
    if isinstance(old, Tensor):
        # Without a cast, packing returns the parameters themselves, so both can be one tensor.
        if old.data_ptr() != new.data_ptr():
            old.copy_(new)
    elif isinstance(old, list | tuple):
        for one, other in zip(old, new, strict=True):
            copy_in_place(one, other)
    elif is_dataclass(old):
        for field in fields(old):
            copy_in_place(getattr(old, field.name), getattr(new, field.name))
