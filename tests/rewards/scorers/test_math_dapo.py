"""Math answers after "Answer:" are scored."""

from __future__ import annotations

import pytest

from slipstream.rewards.scorers.math_dapo import NO_ANSWER, compute_score, extract_answer


@pytest.mark.parametrize(
    ("response", "pred"),
    [
        ("", NO_ANSWER),
        ("113", NO_ANSWER),
        ("Answer: 113", "113"),
        ("answer : 113", "113"),
        ("ANSWER:113", "113"),
        ("Answer:\n113", "113"),
        ("Answer: $113$", "113"),
        (r"Answer: \boxed{113}", "113"),
        (r"Answer: $\boxed{113}$.", "113"),
        ("Answer: -113", "-113"),
        ("Answer: 1,113", "1113"),
        ("Answer: (1,113)", "(1,113)"),
        ("Answer: 1{,}113", "1113"),
        ("Answer: x = 113", "113"),
        ("Answer: 113 degrees", "113"),
        (r"Answer: 113^\circ", "113"),
        (r"Answer: \$113", "113"),
        (r"Answer: 113\text{ cm}", "113"),
        (r"Answer: \frac12", r"\frac{1}{2}"),
        (r"Answer: \sqrt3", r"\sqrt{3}"),
        ("Answer: a dog", "dog"),
        ("Answer: 1\nAnswer: 2", "2"),
        ("Answer: 1 Answer: 2", "1Answer:2"),
        ("Answer: 113\n" + "x" * 300, NO_ANSWER),
        ("The final answer is 113", NO_ANSWER),
        (r"so \boxed{113}", "113"),
        (r"so \boxed{113}" + "x" * 100, NO_ANSWER),
        (r"\boxed{1} Answer: 2", "2"),
        ("Answer: π", "π"),
        ("x" * 1_000_000 + "Answer: 113", "113"),
    ],
)
def test_extract_answer(response: str, pred: str) -> None:
    assert extract_answer(response) == pred


def test_compute_score_returns_score_acc_and_pred() -> None:
    assert compute_score("aime2024", "Answer: 1,113", "1113") == {
        "score": 1.0,
        "acc": True,
        "pred": "1113",
    }
    assert compute_score("aime2024", "Answer: 3", 4) == {"score": -1.0, "acc": False, "pred": "3"}
    # Without an answer the score is -1.
    assert compute_score("aime2024", "", "4")["score"] == -1.0
    with pytest.raises(ValueError, match="no ground truth"):
        compute_score("aime2024", "Answer: 3", None)
