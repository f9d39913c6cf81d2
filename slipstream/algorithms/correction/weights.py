"""Importance weights of rollout tokens: truncated (TIS), or zeroed outside bounds (icepop)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.algorithms.aggregation import masked_sum, zero_masked
from slipstream.algorithms.correction.settings import RolloutCorrectionConfig, WeightBounds

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to +- this before exp, as is usual."""


class ImportanceWeights(NamedTuple):
    """Importance weights (B, T), 0 where masked: `raw` are the ratios, within e^+-20; `used` are
    truncated; `final` are also batch-normalized, and multiply the loss."""

    raw: Tensor
    used: Tensor
    final: Tensor


def log_ratios(old_log_prob: Tensor, rollout_log_prob: Tensor, targets: Tensor) -> Tensor:
    """rho = old_log_prob - rollout_log_prob, detached, 0 where `targets` is 0, in float32 or
    float64."""
    dtype = torch.promote_types(old_log_prob.dtype, rollout_log_prob.dtype)
    dtype = torch.promote_types(dtype, torch.float32)
    old, rollout = old_log_prob.detach().to(dtype), rollout_log_prob.detach().to(dtype)
    return zero_masked(old - rollout, targets)


@torch.no_grad()
def importance_weights(
    log_ratio: Tensor, targets: Tensor, config: RolloutCorrectionConfig
) -> ImportanceWeights:
    """w = e^rho per token, or e^(sum rho) for all tokens of a sequence, with bounds applied.

    `log_ratio` is (B, T). `targets` (B, T) is 1 for target tokens, else 0. Truncation:
    min(w, high) (https://fengyao.notion.site/off-policy-rl). Icepop: w if low <= w <= high, else 0.
    Batch normalization divides by the mean of the bounded weights, over all target tokens, or over
    non-empty sequences at sequence level. If all weights are 0, they stay 0.

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
    """Apply the bounds: truncation, or icepop if there is a lower bound."""
    if bounds.low is None:
        return weights.clamp(max=bounds.high)
    inside = (weights >= bounds.low) & (weights <= bounds.high)
    return torch.where(inside, weights, 0.0)


def per_sequence_mean(values: Tensor, targets: Tensor) -> Tensor:
    """The mean over target tokens of each row with target tokens; one entry per such row."""
    count = targets.sum(dim=-1)
    kept = count > 0
    return masked_sum(values, targets, dim=-1)[kept] / count[kept]
