"""Geometry3K scores the boxed answer and the think block."""

from __future__ import annotations

import pytest

from slipstream.rewards.scorers.geometry3k import compute_score

THOUGHT = "<think>so</think>"


pytest.importorskip("math_verify", reason="the extra `math` is not installed")


@pytest.mark.parametrize(
    ("answer", "truth", "right"),
    [
        (r"\sqrt{8}", r"2\sqrt{2}", True),
        (r"4\sqrt{2}", r"2\sqrt{2}", False),
        (r"x^2+2x+1", "(x+1)^2", True),
        (r"\frac{2}{4}", r"\frac{1}{2}", False),
        (r"\frac{10}{4}\pi", r"\frac{5}{2}\pi", True),
        ("2.83", r"2\sqrt{2}", False),
    ],
)
def test_answers_are_compared_by_value(answer: str, truth: str, right: bool) -> None:
    score = compute_score("hiyouga/geometry3k", rf"{THOUGHT}\boxed{{{answer}}}", truth)
    assert score == pytest.approx(1.0 if right else 0.1)


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("", 0.0),
        (THOUGHT, 0.0),
        (r"\boxed{5}", 0.9),
        (rf"{THOUGHT}\boxed{{5}}", 1.0),
        (rf"{THOUGHT} the answer is \boxed{{5}}.", 1.0),
        (f"\n {THOUGHT}\n\\boxed{{5}}", 1.0),
        ("<think>\nso\n</think>\\boxed{5}", 1.0),
        (rf"{THOUGHT}\boxed{{4}}", 0.1),
        (rf"first {THOUGHT}\boxed{{5}}", 0.9),
        (r"<think>so \boxed{5}", 0.9),
        (r"<think>\boxed{5}</think>", 0.9),
        (r"<think>\boxed{4}</think>\boxed{5}", 1.0),
        (r"<think>\boxed{5}</think>\boxed{4}", 0.1),
        (r"<think></think>\boxed{5}", 1.0),
        (rf"{THOUGHT}\boxed{{5", 0.0),
        (rf"{THOUGHT}\boxed{{5.0}}", 1.0),
        (rf"{THOUGHT}\boxed{{5.1}}", 0.1),
        (rf"{THOUGHT}\boxed{{5\text{{ cm}}}}", 1.0),
        (rf"{THOUGHT}\boxed{{5^\circ}}", 1.0),
        (rf"{THOUGHT}\boxed{{-5}}", 0.1),
        (rf"{THOUGHT}\boxed{{x=5}}", 1.0),
        (THOUGHT + "\\boxed{\uff15}", 0.1),
        (rf"<think>{'x' * 1_000_000}</think>\boxed{{5}}", 1.0),
    ],
)
def test_scores(response: str, score: float) -> None:
    assert compute_score("hiyouga/geometry3k", response, "5") == pytest.approx(score)


def test_a_missing_ground_truth_raises() -> None:
    with pytest.raises(ValueError, match="no ground truth"):
        compute_score("hiyouga/geometry3k", r"\boxed{5}", None)
