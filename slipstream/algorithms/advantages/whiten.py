"""Whitening over the target tokens of a whole batch. Called by the estimators that whiten."""

from __future__ import annotations

from torch import Tensor

from slipstream.algorithms.aggregation import zero_masked

WHITEN_EPS = 1e-8

WHITENING = frozenset({"gae", "gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"})
"""The estimators that whiten. They need at least two target tokens."""


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) where `mask` is not 0, else 0. The variance uses n - 1.

    It is computed in float64 over all rows, which should be the whole batch. The result has the
    dtype of `values`. Without `shift_mean` the mean is added back.

    Source: advantage normalisation of PPO's implementations, https://arxiv.org/abs/2005.12729.

    Raises:
        ValueError: there are fewer than two unmasked values.
    """
    mean, var = _moments(values, mask)
    whitened = (values.double() - mean) * (var + WHITEN_EPS).rsqrt()
    if not shift_mean:
        whitened = whitened + mean
    return zero_masked(whitened, mask).to(values.dtype)


def _moments(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    if values.shape != mask.shape:
        raise ValueError(
            f"values and mask must have one shape, got {tuple(values.shape)} and "
            f"{tuple(mask.shape)}"
        )
    target = mask != 0
    count = int(target.sum())
    if count < 2:
        raise ValueError(
            f"a variance needs at least 2 target tokens, got {count}; use a larger batch, or an "
            "algorithm.adv_estimator that does not whiten (such as grpo)"
        )
    chosen = values.double()[target]
    mean = chosen.mean()
    return mean, (chosen - mean).square().sum() / (count - 1)
