"""Rejection: remove tokens or whole sequences from the mask if their ratio is too far from 1.

Unlike importance weights, rejection does not change the weight of the remaining tokens. The effect
is that of a trust region (https://arxiv.org/abs/2512.23075).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.algorithms.correction.settings import Rejection, RsStatistic
from slipstream.algorithms.correction.weights import LOG_RATIO_BOUND


class Rejected(NamedTuple):
    """`keep` (B, T) bool, and the `statistic` (B, T) or (B, 1) that was compared with the
    bounds."""

    keep: Tensor
    statistic: Tensor


@torch.no_grad()
def rejection_mask(log_ratio: Tensor, targets: Tensor, rule: Rejection) -> Rejected:
    """Apply one rule: keep tokens with low <= s <= high. With rho the log-ratio (0 where masked):

    - token statistic: rho (`ratio`), -rho (`k1`), rho^2 / 2 (`k2`), e^rho - 1 - rho (`k3`, with rho
      clamped to +-20);
    - level: s per token, or for the whole row its sum, mean or max over target tokens. The mean of
      `ratio` is the log of the geometric mean. A row without target tokens has 0 and is kept.

    If the statistic is NaN, the token or sequence is rejected.
    """
    values = _statistic(log_ratio, rule.statistic) * targets
    match rule.level:
        case "token":
            statistic = values
        case "seq_sum":
            statistic = values.sum(dim=-1, keepdim=True)
        case "seq_mean":
            count = targets.sum(dim=-1, keepdim=True).clamp(min=1)
            statistic = values.sum(dim=-1, keepdim=True) / count
        case "seq_max":
            # k2 and k3 are never negative, so zeros at masked positions do not matter.
            statistic = values.amax(dim=-1, keepdim=True)
    keep = (statistic >= rule.low) & (statistic <= rule.high) | (targets == 0)
    return Rejected(keep, statistic)


def _statistic(log_ratio: Tensor, kind: RsStatistic) -> Tensor:
    match kind:
        case "ratio":
            return log_ratio
        case "k1":
            return -log_ratio
        case "k2":
            return 0.5 * log_ratio.square()
        case "k3":
            bounded = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
            return bounded.expm1() - bounded
