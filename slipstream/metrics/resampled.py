"""Estimates best, worst and majority of k responses as verl does.

k of a prompt's N responses are drawn with replacement, 1000 times. Every prompt uses a generator
with the same seed, so all prompts have the same draws. `batch_metrics` computes pass@k, the exact
value without replacement.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

RESAMPLES, SEED = 1000, 42
"""The values that verl uses."""

_AT_ONCE = 1 << 22
"""Maximum number of values drawn at once, to limit memory."""


def subset_sizes(responses: int) -> list[int]:
    """Return the powers of two from 2 to below N, and N; empty for a single response."""
    sizes = []
    k = 2
    while k < responses:
        sizes.append(k)
        k *= 2
    return [*sizes, responses] if responses > 1 else []


def best_and_worst(rows: Sequence[Sequence[float]], k: int) -> dict[str, float]:
    """Return `best@k/{mean,std}` and `worst@k/{mean,std}` of values (P, N).

    Mean and standard deviation are over the resamples of one prompt, then averaged over prompts.
    """
    values = np.array(rows, dtype=np.float64)
    draws = _draws(values.shape[1], k)
    found: dict[str, list[npt.NDArray[np.float64]]] = {}
    step = max(1, _AT_ONCE // draws.size)
    for start in range(0, len(values), step):
        drawn = values[start : start + step, draws]
        for name, extreme in (("best", drawn.max(2)), ("worst", drawn.min(2))):
            found.setdefault(f"{name}@{k}/mean", []).append(extreme.mean(1))
            found.setdefault(f"{name}@{k}/std", []).append(extreme.std(1))
    return {name: float(np.concatenate(parts).mean()) for name, parts in found.items()}


def majority(
    rows: Sequence[Sequence[float]], answers: Sequence[Sequence[str]], k: int
) -> dict[str, float]:
    """Return `maj@k/{mean,std}` of values (P, N) by a majority vote over their answers (P, N).

    A resample scores the value of the first response with the most frequent answer. If several
    answers are equally frequent, the one drawn first wins.
    """
    draws = _draws(len(rows[0]), k)
    means, deviations = [], []
    for values, row_answers in zip(rows, answers, strict=True):
        ballots = np.unique(np.array(row_answers, dtype=object), return_inverse=True)[1][draws]
        # Shape (R, k, k), summed to (R, k): how often each response's answer occurs in its draw.
        votes = (ballots[:, :, None] == ballots[:, None, :]).sum(2)
        first = votes.argmax(1)
        won = np.array(values, dtype=np.float64)[draws][np.arange(len(draws)), first]
        means.append(won.mean())
        deviations.append(won.std())
    return {
        f"maj@{k}/mean": float(np.mean(means)),
        f"maj@{k}/std": float(np.mean(deviations)),
    }


@cache
def _draws(count: int, k: int) -> npt.NDArray[np.int64]:
    """Return the response indices (R, k) of all resamples of `count` responses."""
    # The generator behind `numpy.random.seed`, used in verl's order: resample by resample.
    return np.random.RandomState(SEED).choice(count, (RESAMPLES, k)).astype(np.int64)
