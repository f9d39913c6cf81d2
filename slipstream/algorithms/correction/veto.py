"""Veto: a token that is almost impossible under the trained policy removes its whole sequence."""

from __future__ import annotations

import math

import torch
from torch import Tensor


@torch.no_grad()
def vetoed(log_ratio: Tensor, targets: Tensor, threshold: float) -> Tensor:
    """The target tokens (B, T), bool, with e^rho < `threshold`. rho is not clamped here. The caller
    removes sequences with such a token.

    Source: https://richardli.xyz/rl-collapse-3.
    """
    return (log_ratio < math.log(threshold)) & (targets != 0)
