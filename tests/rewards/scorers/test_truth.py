"""Invalid ground truths raise, instead of making all answers wrong."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.rewards.functions import data_sources, default_compute_score
from slipstream.rewards.scorers.truth import text_of

OTHERS = ("reasoning_gym/*",)
"""Data sources that are graded by the problem in `extra_info`, without a ground truth."""

RIGHT = "<think>x</think> <answer>5</answer> #### 5\n\\boxed{5}\nAnswer: 5"


def test_text_and_numbers_are_valid_ground_truths() -> None:
    assert [text_of(truth, "x", "") for truth in (" 5 ", 5, 1.5)] == ["5", "5", "1.5"]
    assert text_of("", "x", "", empty=True) == ""


def test_numbers_are_written_in_their_shortest_form() -> None:
    numbers = [18.0, 1e22, 1e-7, -0.0, 100, Decimal("18.00"), Fraction(1, 2)]
    found = [text_of(number, "x", "") for number in numbers]
    assert found == ["18", "1" + "0" * 22, "0.0000001", "0", "100", "18", "1/2"]
    arrays = [np.float32(0.1), np.int64(7), np.array(5.0), torch.tensor(3.0)]
    assert [text_of(number, "x", "") for number in arrays] == ["0.1", "7", "5", "3"]


@pytest.mark.parametrize("truth", [float("nan"), float("inf"), Decimal("nan"), np.float64("nan")])
def test_numbers_that_are_not_finite_are_refused(truth: Any) -> None:
    with pytest.raises(ValueError, match=r"missing value .*; set reward_model\.ground_truth"):
        text_of(truth, "x", "")


@pytest.mark.parametrize(
    ("source", "response"),
    [
        ("openai/gsm8k", "#### {}"),
        ("lighteval/MATH", r"\boxed{{{}}}"),
        ("math_dapo", "Answer: {}"),
        ("math_verify", r"\boxed{{{}}}"),
        ("numina_olympiads", r"\boxed{{{}}}"),
        ("exact_match", "{}"),
        ("searchR1_nq", "<answer>{}</answer>"),
    ],
)
def test_a_number_as_ground_truth_equals_its_integer(source: str, response: str) -> None:
    def score(answer: str, truth: Any) -> float:
        truth = {"target": truth} if source.startswith("search") else truth
        scored = default_compute_score(source, response.format(answer), truth, {})
        return float(scored["score"] if isinstance(scored, Mapping) else scored)

    assert score("18", 18.0) == score("18", Decimal("18.00")) == score("18", np.int64(18)) == 1.0
    assert score("1.5", 1.5) == 1.0
    assert score("18", 18.5) <= 0.0
    assert score("180", 18.0) <= 0.0
    # SQuAD's rule ignores punctuation.
    assert score("-18", 18.0) <= (1.0 if source == "searchR1_nq" else 0.0)


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
