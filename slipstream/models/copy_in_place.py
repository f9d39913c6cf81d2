"""New weights in the place of old ones: what was recorded for their addresses goes on being right.

Used by the engine and by drafters, where they record (`inference.engine.recorder`).
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def copy_in_place(old: Any, new: Any) -> None:
    """Copy all tensors of packed weights into those of others of the same shapes."""
    if isinstance(old, Tensor):
        # Where nothing is cast, what is packed are the parameters themselves.
        if old.data_ptr() != new.data_ptr():
            old.copy_(new)
    elif isinstance(old, list | tuple):
        for one, other in zip(old, new, strict=True):
            copy_in_place(one, other)
    elif is_dataclass(old):
        for field in fields(old):
            copy_in_place(getattr(old, field.name), getattr(new, field.name))
