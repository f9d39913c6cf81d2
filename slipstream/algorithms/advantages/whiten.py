"""Variance and whitening over the target tokens of a whole batch."""

from __future__ import annotations

from torch import Tensor

from slipstream.algorithms.aggregation import zero_masked

WHITEN_EPS = 1e-8

WHITENING = frozenset({"gae", "gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"})
"""The estimators that whiten. They need at least two target tokens."""


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance of `values` where `mask` is not 0, a float64 scalar; divided by n - 1 if `unbiased`.

    `values` and `mask` must have the same shape. Values at masked positions are ignored.

    Raises:
        ValueError: there are too few unmasked values: none, or one with `unbiased`.
    """
    return _moments(values, mask, unbiased)[1]


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) where `mask` is not 0, else 0. The variance uses n - 1.

    It is computed in float64 over all rows, which should be the whole batch. The result has the
    dtype of `values`. Without `shift_mean` the mean is added back.

    Source: advantage normalisation of PPO's implementations, https://arxiv.org/abs/2005.12729.

    Raises:
        ValueError: there are fewer than two unmasked values.
    """
    mean, var = _moments(values, mask, unbiased=True)
    whitened = (values.double() - mean) * (var + WHITEN_EPS).rsqrt()
    if not shift_mean:
        whitened = whitened + mean
    return zero_masked(whitened, mask).to(values.dtype)


def _moments(values: Tensor, mask: Tensor, unbiased: bool) -> tuple[Tensor, Tensor]:
    if values.shape != mask.shape:
        raise ValueError(
            f"values and mask must have one shape, got {tuple(values.shape)} and "
            f"{tuple(mask.shape)}"
        )
    target = mask != 0
    count = int(target.sum())
    if count < 1 + unbiased:
        raise ValueError(
            f"a variance needs at least {1 + unbiased} target tokens, got {count}; use a larger "
            f"batch, or an algorithm.adv_estimator that does not whiten (such as grpo)"
        )
    chosen = values.double()[target]
    mean = chosen.mean()
    return mean, (chosen - mean).square().sum() / (count - unbiased)
