"""NuminaMath answers in boxes and in words are scored."""

from __future__ import annotations

import pytest

from slipstream.rewards.functions import default_compute_score
from slipstream.rewards.scorers.prime_math import compute_score, extract_answer

pytest.importorskip("math_verify", reason="the extra `math` is not installed")


@pytest.mark.parametrize(
    ("response", "truth", "answer", "score"),
    [
        (r"So \boxed{7}.", "7", "7", 1.0),
        (r"\boxed{7} or \boxed{8}", "8", "8", 1.0),
        (r"\boxed{8} or \boxed{7}", "8", "7", 0.0),
        (r"\boxed{\frac{1}{2}}", "0.5", r"\frac{1}{2}", 1.0),
        (r"\boxed{\dfrac{1}{2}}", r"\frac12", r"\dfrac{1}{2}", 1.0),
        (r"\boxed{\frac{2}{4}}", r"\frac12", r"\frac{2}{4}", 1.0),
        (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", r"\sqrt{8}", 1.0),
        (r"\boxed{-3}", "3", "-3", 0.0),
        (r"\boxed{1{,}000}", "1000", "1{,}000", 1.0),
        (r"\boxed{x = 5}", "5", "x = 5", 1.0),
        (r"\boxed{}", "5", None, 0.0),
        ("The answer: 5", "5", "5", 1.0),
        ("ANSWER : $5$.", "5", "5", 1.0),
        ("answer: 4\nNo. Answer: 5\nDone", "5", "5", 1.0),
        ("The answer is 5.", "5", "5", 1.0),
        ("The sum is 3, and so the result is $x = 5$.", "5", "5", 1.0),
        ("It is 2 + 3 = 5", "5", "5", 1.0),
        ("It is 2 + 3 = 6", "5", "6", 0.0),
        ("The roots are (1, 2)", "(1,2)", "(1, 2)", 1.0),
        ("5", "5", "5", 1.0),
        ("$x = 5$", "5", "5", 1.0),
        (r"So \(x = 5\).", "5", "5", 1.0),
        (r"The answer is \(5\).", "5", "5", 1.0),
        ("1 000.", "1000", "1 000", 1.0),
        ("So we get 5", "5", "5", 1.0),
        ("Result: 5", "5", "5", 1.0),
        ("5 is the answer", "5", "5", 1.0),
        ("The answer is 5. I hope this is fine", "5", "5", 1.0),
        ("The answer is 6. 5 is too small", "5", "6", 0.0),
        ("6 is the answer", "5", "6", 0.0),
        ("6", "5", "6", 0.0),
        ("This has no result", "5", "This has no result", 0.0),
        ("so 5", "5", "so 5", 0.0),
        ("5 or 6", "5", "5 or 6", 0.0),
        (r"\boxed{5", "5", None, 0.0),
        ("5 " * 200, "5", None, 0.0),
        ("the answer is", "5", None, 0.0),
        ("", "5", None, 0.0),
        ("the answer is ½", r"\frac{1}{2}", "½", 1.0),
        ("the answer is ½", r"\frac{1}{3}", "½", 0.0),
        ("The answer is 5." + " " * 300, "5", "5", 1.0),
        ("The answer is 5." + "x" * 300, "5", None, 0.0),
        ("x" * 1_000_000 + " The answer is 5.", "5", "5", 1.0),
        (r"\boxed{" * 200_000, "5", None, 0.0),
    ],
)
def test_answers_are_extracted_and_scored(
    response: str, truth: str, answer: str | None, score: float
) -> None:
    assert extract_answer(response) == answer
    assert compute_score("numina_amc_aime", response, truth) == score


def test_numina_data_sources_select_this_scorer() -> None:
    for name in (
        "aops_forum",
        "synthetic_math",
        "amc_aime",
        "synthetic_amc",
        "cn_k12",
        "olympiads",
    ):
        assert default_compute_score(f"numina_{name}", r"\boxed{\frac{2}{4}}", "0.5") == 1.0


def test_a_missing_ground_truth_raises() -> None:
    with pytest.raises(ValueError, match="no ground truth"):
        compute_score("numina_amc_aime", "5", None)
