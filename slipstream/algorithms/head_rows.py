"""Shared parts of functions that apply the LM head chunk by chunk: checks and gradient sums.

`log_probs`, `full_kl` and `correction.support_replay` use this module.
"""

from __future__ import annotations

import torch
from torch import Tensor


class HeadGradients:
    """Accumulates the gradients of hidden states and LM head from logit gradients, by chunks.

    The sum over chunks is in float32 (float64 for float64), because bfloat16 would lose small
    terms.
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
        """Add a chunk. `grad_logits` (rows, V) is the gradient of the product of hidden states and
        head, or of `hidden_ND` itself without a head."""
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
                # In place, because a separate product would need another V x D matrix.
                self._grad_weight.addmm_(grad_logits.T, hidden)
            else:
                self._grad_weight += grad_logits.T @ hidden

    def result(self) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of hidden states and head, in their dtypes; None if not needed."""
        grad_weight = self._grad_weight
        if grad_weight is not None and self._weight is not None:
            grad_weight = grad_weight.to(self._weight.dtype)
        return self._grad_hidden, grad_weight


def check_head(hidden_ND: Tensor, weight_VD: Tensor | None, chunk_size: int) -> None:
    """Raise ValueError if hidden states do not fit the head or `chunk_size` is not positive."""
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


def vocab_size(hidden_ND: Tensor, weight_VD: Tensor | None) -> int:
    """V, from the head, or from the logits if there is no head."""
    return hidden_ND.shape[1] if weight_VD is None else len(weight_VD)


def chunks(num_rows: int, chunk_size: int) -> list[slice]:
    """Consecutive slices of at most `chunk_size` rows."""
    return [slice(start, start + chunk_size) for start in range(0, num_rows, chunk_size)]
