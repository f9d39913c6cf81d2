"""The best, the worst and the majority of k responses as VERL estimates them: by drawing k of a
prompt's N, with replacement, a thousand times.

Each prompt is drawn from by the same generator of the same seed, so all prompts have the same
draws. The exact value, without replacement, is pass@k (`batch_metrics`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

RESAMPLES, SEED = 1000, 42
"""VERL's."""

_AT_ONCE = 1 << 22
"""Numbers that are drawn at once."""


def subset_sizes(responses: int) -> list[int]:
    """The powers of two below N, and N; none of a single response."""
    sizes = []
    k = 2
    while k < responses:
        sizes.append(k)
        k *= 2
    return [*sizes, responses] if responses > 1 else []


def best_and_worst(rows: Sequence[Sequence[float]], k: int) -> dict[str, float]:
    """`best@k/{mean,std}` and `worst@k/{mean,std}` of values (P, N): of each prompt over the
    resamples, averaged over prompts."""
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
    """`maj@k/{mean,std}` of values (P, N) whose answers (P, N) vote: what the most frequent answer
    of a resample is worth where it stands first. Of answers as frequent, that which is drawn first.
    """
    draws = _draws(len(rows[0]), k)
    means, deviations = [], []
    for values, said in zip(rows, answers, strict=True):
        ballots = np.unique(np.array(said, dtype=object), return_inverse=True)[1][draws]
        # Resamples by places by places: how often each place's answer stands in its resample.
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
    """Which of `count` responses each resample (R, k) is."""
    # The generator that `numpy.random.seed` seeds, in VERL's order: resample by resample.
    return np.random.RandomState(SEED).choice(count, (RESAMPLES, k)).astype(np.int64)
