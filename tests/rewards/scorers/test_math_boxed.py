"""Boxed math answers are scored."""

from __future__ import annotations

import pytest

from slipstream.rewards.scorers.math_boxed import compute_score


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("", "5", 0.0),
        (r"\boxed{5}", 5, 1.0),
        (r"\boxed{ 5 }", "5", 1.0),
        (r"\boxed{+5}", "5", 1.0),
        ("\\boxed\n{5}", "5", 1.0),
        (r"\boxed{5}", 5.0, 1.0),
        (r"\boxed{-5}", 5.0, 0.0),
        (r"\boxed{4} no, \boxed{5}", "5", 1.0),
        (r"\boxed{5} no, \boxed{4}", "5", 0.0),
        (r"\boxed{\boxed{5}}", "5", 1.0),
        (r"\fbox{5}", "5", 1.0),
        (r"\boxed{45^\circ}", "45", 1.0),
        (r"\boxed{0.5}", r"\dfrac12", 1.0),
        (r"\boxed{.5}", "0.5", 1.0),
        (r"\boxed{0.50}", "0.5", 1.0),
        (r"\boxed{0.05}", "0.5", 0.0),
        (r"\boxed{1{,}000}", "1{,}000", 1.0),
        (r"\boxed{\left(-\infty, 2\right]}", r"(-\infty,2]", 1.0),
        (r"\boxed{\sqrt2}", r"\sqrt{2}", 1.0),
        (r"\boxed{\text{(A)}}", r"\text{(A)}", 1.0),
        (r"\boxed{½}", r"\frac{1}{2}", 1.0),
        (r"\boxed{½}", r"\frac{1}{3}", 0.0),
        (r"\boxed{π}", "π", 1.0),
        ("x" * 1_000_000 + r"\boxed{5}", "5", 1.0),
        (r"\boxed{" + "5" * 1_000_000 + "}", "5", 0.0),
    ],
)
def test_scores(response: str, truth: object, score: float) -> None:
    assert compute_score("lighteval/MATH", response, truth) == score


def test_a_missing_ground_truth_raises() -> None:
    with pytest.raises(ValueError, match="no ground truth"):
        compute_score("lighteval/MATH", r"\boxed{5}", None)
