"""verl's module `verl.utils.model`: positions of tokens."""

from __future__ import annotations

from torch import Tensor

__all__ = ["compute_position_id_with_mask"]


def compute_position_id_with_mask(mask: Tensor) -> Tensor:
    """Return the positions (..., T) of the tokens of an attention mask; padding in front has 0."""
    return (mask.cumsum(dim=-1) - 1).clamp(min=0)
