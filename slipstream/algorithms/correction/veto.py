"""Veto: one token that the trained policy finds all but impossible removes its whole sequence."""

from __future__ import annotations

import math

import torch
from torch import Tensor


@torch.no_grad()
def vetoed(log_ratio: Tensor, targets: Tensor, threshold: float) -> Tensor:
    """(B, T) bool: target tokens with e^rho < `threshold`; rho is not clamped here. Sequences with
    any are to be dropped.

    Source: https://richardli.xyz/rl-collapse-3.
    """
    return (log_ratio < math.log(threshold)) & (targets != 0)
