"""Countdown answers are verified."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.rewards.countdown import compute_score, verify

NUMBERS, TARGET = [8, 15, 6, 10], 25
WORDS = ["answer", "+", "-", "1", "2", "<eos>", "=", ","]


@pytest.mark.parametrize(
    "text",
    [
        "answer 10 + 15",
        "6 + 15 = 21 , 10 + 15 = 25 ! answer 10 + 15",
        "answer 15 + 10 <eos>",
        "answer 15 + 10 <eos> answer 1 + 1",
        "answer 15 + <unk> 10 <pad> <eos>",
        "answer 8 + 8 answer 10+15",
        "Answer: 15 + 10\n",
        "answer 15 + 8 + 8 answer 15 + 10",
        "answer 15 + 10",
        "ANSWER 10 - 6 + 15 + 6" + " answer 015 + 10",
    ],
)
def test_correct_answers(text: str) -> None:
    assert verify(NUMBERS, TARGET, text).correct


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no answer"),
        ("10 + 15 = 25 !", "no answer"),
        ("noanswer 10 + 15", "no answer"),
        ("<eos> answer 10 + 15", "no answer"),
        ("answer", "empty answer"),
        ("answer 10 + 15 answer", "empty answer"),
        ("answer 10 + 15 answer 8 + 6", "equals 14, not 25"),
        ("answer 25", "25 is not given"),
        ("answer 10 + 10", "10 is used more often than given"),
        ("answer 10 + 15 + 8 - 8", "8 is used more often than given"),
        ("answer 10 + 15 = 25", "malformed answer: '= 25'"),
        ("answer 10 + 15 !", "malformed answer: '!'"),
        ("answer 10 + 15 is right", "malformed answer: 'is right'"),
        ("answer ( 10 + 15 )", "malformed answer: '( 10 + 15 )'"),
        ("answer 10 * 15", "malformed answer: '* 15'"),
        ("answer 10 15", "malformed answer: numbers and signs must alternate"),
        ("answer 10 15 +", "malformed answer: numbers and signs must alternate"),
        ("answer - 10 + 15", "malformed answer: numbers and signs must alternate"),
        ("answer 10 + + 15", "malformed answer: numbers and signs must alternate"),
        ("answer 10 + 15 -", "malformed answer: numbers and signs must alternate"),
        ("answer __import__('os').abort()", "malformed answer: \"__import__('os').abo\""),
        ("answer " + "9" * 5000, "malformed answer: a number of 5000 digits"),
        ("answer " + "1 + " * 500 + "1", "malformed answer: more than 64 terms"),
        ("answer 1e1 + 15", "malformed answer: 'e1 + 15'"),
        ("answer 1_0 + 15", "malformed answer: '_0 + 15'"),
        # Digits of other scripts, and the true minus sign.
        ("answer \u0661\u0660 + 15", "malformed answer: '\u0661\u0660 + 15'"),
        ("answer 15 \u2212 10", "malformed answer: '\u2212 10'"),
        ("answer 10 + 15 \x00", "malformed answer: '\\x00'"),
    ],
)
def test_wrong_answers_have_a_reason(text: str, reason: str) -> None:
    verdict = verify(NUMBERS, TARGET, text)
    assert not verdict.correct
    assert verdict.reason == reason


def test_repeated_numbers_may_be_used_as_often_as_given() -> None:
    assert verify([5, 5, 2], 10, "answer 5 + 5").correct
    assert not verify([5, 2], 10, "answer 5 + 5").correct


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.text(), st.lists(st.sampled_from(WORDS)).map(" ".join)))
def test_verify_never_raises(text: str) -> None:
    verdict = verify([1, 2], 3, text)
    assert verdict.reason
    assert verdict.correct == (verdict.reason == "correct")


@settings(max_examples=100, deadline=None)
@given(st.permutations(range(1, 8)), st.lists(st.sampled_from("+-"), min_size=1, max_size=6))
def test_every_correct_expression_is_accepted(numbers: list[int], signs: list[str]) -> None:
    used = numbers[: len(signs) + 1]
    value = used[0] + sum(n if s == "+" else -n for s, n in zip(signs, used[1:], strict=True))
    words = [str(used[0])] + [w for s, n in zip(signs, used[1:], strict=True) for w in (s, str(n))]
    text = f"answer {' '.join(words)}"
    assert verify(numbers, value, text).correct
    assert not verify(numbers, value + 1, text).correct
    assert not verify(used[1:], value, text).correct


def test_compute_score_returns_1_or_0_and_checks_the_ground_truth() -> None:
    truth = {"numbers": [1, 2, 4], "target": 6}
    assert compute_score("countdown", "answer 2 + 4", truth) == 1.0
    assert compute_score("countdown", "answer 1 + 4", truth) == 0.0
    for bad in (None, {"numbers": [1]}, "25", {"numbers": ["x"], "target": 1}):
        with pytest.raises(ValueError, match="countdown ground truth must be"):
            compute_score("countdown", "answer 1", bad)
