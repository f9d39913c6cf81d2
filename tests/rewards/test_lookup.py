"""Answers of the lookup task."""

from __future__ import annotations

import pytest

from slipstream.rewards.functions import default_compute_score
from slipstream.rewards.lookup import answer_of, compute_score


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("answer ben", "ben"),
        ("answer: ben .", "ben"),
        ("answer ana <end> answer ben", "ben"),
        ("ben", None),
        ("<answer> ben", None),
        ("answer", None),
    ],
)
def test_the_last_answer_counts(text: str, answer: str | None) -> None:
    assert answer_of(text) == answer


@pytest.mark.parametrize(("text", "score"), [("answer ben", 1.0), ("answer ana", 0.0), ("", 0.0)])
def test_the_score_is_that_of_the_answer(text: str, score: float) -> None:
    found = compute_score("lookup", text, "ben")
    assert (found["score"], found["acc"]) == (score, score)
    assert default_compute_score("lookup", text, "ben") == found
