"""Heads over the decoder's final hidden state. They take hidden states, so that a critic, an
adapter or a vocabulary-parallel head needs no second decoder.

The log-prob head is `algorithms.log_probs` over `PackedDecoder.lm_head`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ValueHead(nn.Module):
    """One scalar per position: (..., D) -> (...,), in fp32. Starts at zero everywhere."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        values: Tensor = self.linear(hidden.to(torch.float32))
        return values.squeeze(-1)
