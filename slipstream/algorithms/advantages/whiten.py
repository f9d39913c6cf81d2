"""Zero mean and unit variance over target tokens. Called by estimators that whiten a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.algorithms.aggregation import zero_masked

EPS = 1e-8


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over target tokens, 0 elsewhere; the variance has n - 1, as in
    VERL. Without `shift_mean` the mean is added back. In float64.

    Raises:
        ValueError: as `masked_var`.
    """
    targets = mask != 0
    x = zero_masked(values.double(), targets)
    variance = masked_var(x, targets)
    mean = x.sum() / targets.sum()
    whitened = (x - mean) * torch.rsqrt(variance + EPS)
    return torch.where(targets, whitened if shift_mean else whitened + mean, 0.0)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance over target tokens; `unbiased` with n - 1.

    Raises:
        ValueError: fewer than two target tokens, whose spread is not known.
    """
    targets = mask != 0
    count = int(targets.sum())
    if count < 2:
        raise ValueError(
            f"advantages are whitened over the batch, which has {count} target token"
            f"{'' if count == 1 else 's'}: two are needed to know a spread; raise "
            "data.train_batch_size or data.max_response_length, or use an estimator that does not "
            "whiten (algorithm.adv_estimator=grpo)"
        )
    x = zero_masked(values.double(), targets)
    mean = x.sum() / count
    squares = torch.where(targets, (x - mean).square(), 0.0).sum()
    return squares / (count - 1 if unbiased else count)
