"""Importance weights of rollout tokens: truncated (TIS) or zeroed outside bounds (icepop).

Knows nothing about masks that rejection makes; see `rejection` and `apply`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.algorithms.aggregation import masked_sum, zero_masked
from slipstream.algorithms.correction.settings import RolloutCorrectionConfig, WeightBounds

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to +- this before exp, as everywhere in the field."""


class ImportanceWeights(NamedTuple):
    """(B, T) weights, 0 where masked. `raw` are the ratios, e^+-20 at most; `used` those after
    truncation; `final` those after batch normalization, which the loss takes."""

    raw: Tensor
    used: Tensor
    final: Tensor


def log_ratios(old_log_prob: Tensor, rollout_log_prob: Tensor, targets: Tensor) -> Tensor:
    """rho = old_log_prob - rollout_log_prob, detached, 0 where `targets` is, at least float32."""
    dtype = torch.promote_types(old_log_prob.dtype, rollout_log_prob.dtype)
    dtype = torch.promote_types(dtype, torch.float32)
    old, rollout = old_log_prob.detach().to(dtype), rollout_log_prob.detach().to(dtype)
    return zero_masked(old - rollout, targets)


@torch.no_grad()
def importance_weights(
    log_ratio: Tensor, targets: Tensor, config: RolloutCorrectionConfig
) -> ImportanceWeights:
    """w = e^rho per token, or e^(sum rho) for all tokens of a sequence; then bounded.

    `log_ratio` (B, T) and `targets` (B, T), 1 for target tokens and else 0. Truncated:
    min(w, high) (https://fengyao.notion.site/off-policy-rl). Icepop: w where low <= w <= high, else
    0. Batch normalization divides by the mean of the bounded weights, over all target tokens, or
    over non-empty sequences at sequence level; weights that are all 0 stay so.

    Raises:
        ValueError: `config.rollout_is` is None.
    """
    if config.rollout_is is None:
        raise ValueError("importance weights need rollout_is: token or sequence")
    sequence = config.rollout_is == "sequence"
    if sequence:
        log_ratio = log_ratio.sum(dim=-1, keepdim=True).expand_as(log_ratio)
    raw = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp() * targets
    used = bounded(raw, config.weight_bounds)
    final = used
    if config.rollout_is_batch_normalize:
        mean = (per_sequence_mean(used, targets) if sequence else used[targets != 0]).mean()
        final = used / torch.where(mean > 0, mean, 1.0)
    return ImportanceWeights(raw, used, final)


def bounded(weights: Tensor, bounds: WeightBounds) -> Tensor:
    """Truncation from above, or icepop where there is a lower bound."""
    if bounds.low is None:
        return weights.clamp(max=bounds.high)
    inside = (weights >= bounds.low) & (weights <= bounds.high)
    return torch.where(inside, weights, 0.0)


def per_sequence_mean(values: Tensor, targets: Tensor) -> Tensor:
    """Mean over target tokens of each row that has any, (number of such rows,)."""
    count = targets.sum(dim=-1)
    kept = count > 0
    return masked_sum(values, targets, dim=-1)[kept] / count[kept]
