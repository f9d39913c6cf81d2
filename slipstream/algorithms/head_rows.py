"""What functions of the LM head over chunks of rows share: checks, and where gradients add up.

Called by `log_probs`, `full_kl` and `correction.support_replay`.
"""

from __future__ import annotations

import torch
from torch import Tensor


class HeadGradients:
    """Gradients of hidden states and LM head from those of logits, chunk by chunk.

    Chunks add up in float32 (float64 for float64): in bfloat16 the sum would lose the small ones.
    """

    def __init__(
        self, hidden_ND: Tensor, weight_VD: Tensor | None, *, need_hidden: bool, need_weight: bool
    ) -> None:
        self._hidden, self._weight = hidden_ND, weight_VD
        self._grad_hidden = torch.zeros_like(hidden_ND) if need_hidden else None
        self._grad_weight = None
        if need_weight and weight_VD is not None:
            wide = torch.float64 if weight_VD.dtype == torch.float64 else torch.float32
            self._grad_weight = torch.zeros_like(weight_VD, dtype=wide)

    def add(self, rows: slice, grad_logits: Tensor) -> None:
        """`grad_logits` (rows, V) are with respect to the product of hidden states and head, or to
        `hidden_ND` itself where there is no head."""
        if self._weight is None:
            if self._grad_hidden is not None:
                self._grad_hidden[rows] = grad_logits
            return
        grad_logits = grad_logits.to(self._weight.dtype)
        if self._grad_hidden is not None:
            self._grad_hidden[rows] = grad_logits @ self._weight
        if self._grad_weight is not None:
            hidden = self._hidden[rows].to(self._weight.dtype)
            if self._grad_weight.dtype == self._weight.dtype:
                # In place: a product of its own would be another V x D matrix.
                self._grad_weight.addmm_(grad_logits.T, hidden)
            else:
                self._grad_weight += grad_logits.T @ hidden

    def result(self) -> tuple[Tensor | None, Tensor | None]:
        """Of hidden states and head, in their dtypes; None where not needed."""
        grad_weight = self._grad_weight
        if grad_weight is not None and self._weight is not None:
            grad_weight = grad_weight.to(self._weight.dtype)
        return self._grad_hidden, grad_weight


def check_head(hidden_ND: Tensor, weight_VD: Tensor | None, chunk_size: int) -> None:
    """ValueError where hidden states do not fit the head, or `chunk_size` is not positive."""
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be >= 1, got {chunk_size}")
    if weight_VD is None:
        if hidden_ND.ndim != 2:
            raise ValueError(f"expected logits (N, V), got {tuple(hidden_ND.shape)}")
        return
    if hidden_ND.ndim != 2 or weight_VD.ndim != 2 or hidden_ND.shape[1] != weight_VD.shape[1]:
        raise ValueError(
            f"expected hidden (N, D) and weight (V, D), got {tuple(hidden_ND.shape)} and "
            f"{tuple(weight_VD.shape)}"
        )


def num_words(hidden_ND: Tensor, weight_VD: Tensor | None) -> int:
    """V: without a head, hidden states are logits."""
    return hidden_ND.shape[1] if weight_VD is None else len(weight_VD)


def chunks(num_rows: int, chunk_size: int) -> list[slice]:
    """Consecutive slices of at most `chunk_size` rows."""
    return [slice(start, start + chunk_size) for start in range(0, num_rows, chunk_size)]
