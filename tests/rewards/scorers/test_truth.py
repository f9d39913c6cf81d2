"""Invalid ground truths raise, instead of making all answers wrong."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.rewards.functions import data_sources, default_compute_score
from slipstream.rewards.scorers.truth import text_of

OTHERS = ("reasoning_gym/*",)
"""Data sources that are graded by the problem in `extra_info`, without a ground truth."""

RIGHT = "<think>x</think> <answer>5</answer> #### 5\n\\boxed{5}\nAnswer: 5"


def test_text_and_numbers_are_valid_ground_truths() -> None:
    assert [text_of(truth, "x", "") for truth in (" 5 ", 5, 1.5)] == ["5", "5", "1.5"]
    assert text_of("", "x", "", empty=True) == ""


@pytest.mark.parametrize("source", [s.replace("*", "1") for s in data_sources() if s not in OTHERS])
@pytest.mark.parametrize("truth", [None, {}, {"answer": 5}, [], True])
def test_every_scorer_refuses_other_ground_truths(source: str, truth: Any) -> None:
    with pytest.raises(ValueError, match="ground truth"):
        default_compute_score(source, RIGHT, truth, {})


@pytest.mark.parametrize(
    "source", ["gsm8k", "lighteval/MATH", "aime24", "math_verify", "numina_olympiads"]
)
def test_math_scorers_refuse_empty_ground_truths(source: str) -> None:
    with pytest.raises(ValueError, match="the ground truth is empty"):
        default_compute_score(source, RIGHT, " ", {})
    assert default_compute_score(source, RIGHT, 5, {}) in (
        1.0,
        {"score": 1.0, "acc": True, "pred": "5"},
    )
