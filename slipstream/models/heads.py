"""Heads over the decoder's final hidden states.

Heads take hidden states, so that a critic, an adapter or a vocabulary-parallel head needs no second
decoder. The log-prob head is `algorithms.log_probs` over `PackedDecoder.lm_head`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from slipstream.models.linear import PackedLinear


class ValueHead(nn.Linear):
    """One scalar per position: (..., D) -> (...,), in fp32. Its initial values are all 0."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def pack(self) -> PackedLinear:
        """Return the head for rows (N, D) of fp32. Differentiable."""
        return PackedLinear.of(self.weight, self.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.pack()(hidden.to(torch.float32)).squeeze(-1)
