"""best@k, worst@k and maj@k match verl's estimates."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from slipstream.metrics import resampled
from slipstream.metrics.resampled import best_and_worst, majority, subset_sizes


def verls(values: Sequence[float], k: int) -> list[tuple[float, float]]:
    """Reference for one prompt: seed, then draw one resample after the other."""
    np.random.seed(42)
    best, worst = [], []
    for _ in range(1000):
        chosen = [values[i] for i in np.random.choice(len(values), size=k, replace=True)]
        best.append(max(chosen))
        worst.append(min(chosen))
    return [(float(np.mean(x)), float(np.std(x))) for x in (best, worst)]


@pytest.mark.parametrize(("count", "k"), [(2, 2), (5, 2), (5, 4), (5, 5), (16, 8)])
def test_best_and_worst_match_verl(count: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(count)
    rows = [list(rng.integers(0, 2, count) * 1.0) for _ in range(3)] + [list(rng.random(count))]
    expected = np.mean([verls(row, k) for row in rows], axis=0)
    # The result must not depend on how many values are drawn at once.
    for at_once in (1 << 22, 1, 2 * 1000 * k):
        monkeypatch.setattr(resampled, "_AT_ONCE", at_once)
        found = best_and_worst(rows, k)
        names = [f"{name}@{k}/{part}" for name in ("best", "worst") for part in ("mean", "std")]
        assert list(found) == names
        assert list(found.values()) == pytest.approx(expected.flatten().tolist(), rel=1e-12)


def verls_majority(values: Sequence[float], answers: Sequence[str], k: int) -> tuple[float, float]:
    """Reference for one prompt: the first value of the most frequent answer of each resample."""
    np.random.seed(42)
    won = []
    for _ in range(1000):
        by_answer: dict[str, list[float]] = {}
        for i in np.random.choice(len(values), size=k, replace=True):
            by_answer.setdefault(answers[i], []).append(values[i])
        won.append(max(by_answer.values(), key=len)[0])
    return float(np.mean(won)), float(np.std(won))


@pytest.mark.parametrize(("count", "k"), [(2, 2), (5, 2), (5, 4), (5, 5), (16, 8)])
def test_majority_matches_verl(count: int, k: int) -> None:
    rng = np.random.default_rng(count)
    rows = [list(rng.random(count)) for _ in range(3)]
    answers = [[str(a) for a in rng.integers(0, 3, count)] for _ in range(3)]
    expected = np.mean(
        [verls_majority(row, texts, k) for row, texts in zip(rows, answers, strict=True)], axis=0
    )
    found = majority(rows, answers, k)
    assert list(found) == [f"maj@{k}/mean", f"maj@{k}/std"]
    assert list(found.values()) == pytest.approx(expected.tolist(), rel=1e-12)


def test_majority_is_higher_if_wrong_answers_differ() -> None:
    right = [[1.0] * 6 + [0.0] * 4]
    together = [["7"] * 6 + ["8"] * 4]
    apart = [["7"] * 6 + ["1", "2", "3", "4"]]
    assert majority(right, together, 10)["maj@10/mean"] == pytest.approx(0.73, abs=0.05)
    assert majority(right, apart, 10)["maj@10/mean"] > 0.9


def test_best_of_k_estimates_drawing_with_replacement() -> None:
    values = [1.0, 0.0, 0.0, 0.0]
    with_replacement = [max(c) for c in itertools.product(values, repeat=4)]
    exact = sum(with_replacement) / len(with_replacement)
    assert best_and_worst([values], 4)["best@4/mean"] == pytest.approx(exact, abs=0.05)
    # Without replacement the best of these four would always be 1.
    assert exact < 0.7


def test_subset_sizes() -> None:
    assert [subset_sizes(n) for n in (1, 2, 3, 4, 5, 8)] == [
        *([], [2], [2, 3], [2, 4], [2, 4, 5], [2, 4, 8])
    ]
