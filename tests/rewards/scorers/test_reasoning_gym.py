"""Answers to reasoning-gym problems are extracted and graded by the library's rule."""

from __future__ import annotations

import pytest

from slipstream.rewards.scorers.reasoning_gym import compute_score

pytest.importorskip("reasoning_gym")

MEGABYTE = "x" * 1_000_000

# The sum is 1000. The library ignores signs, leading zeros, trailing decimals and commas. An answer
# with the correct number among other text scores the number's share of the characters.
ANSWERS = [
    ("<answer>1000</answer>", 1.0),
    ("<answer> 1000\n</answer>", 1.0),
    ("<answer>+1000</answer>", 1.0),
    ("<answer>1,000</answer>", 1.0),
    ("<answer>01000</answer>", 1.0),
    ("<answer>1000.00</answer>", 1.0),
    ("<answer>+01,000.0</answer>", 1.0),
    ("<answer>-1000</answer>", 4 / 5),
    ("<answer>1001</answer>", 0.0),
    ("<answer>1000.5</answer>", 4 / 6),
    ("<answer>10 00</answer>", 0.0),
    ("<answer></answer>", 0.0),
    ("<answer>  </answer>", 0.0),
    ("1000", 0.0),
    ("", 0.0),
    ("<answer>1000", 0.0),
    ("<Answer>1000</Answer>", 0.0),
    ("<answer>7</answer> no: <answer>1000</answer>", 1.0),
    ("<answer>1000</answer> no: <answer>7</answer>", 0.0),
    ("<answer>one thousand</answer>", 0.0),
    ("<answer>\\boxed{1000}</answer>", 4 / 12),
    ("<answer>\u0661\u0660\u0660\u0660</answer>", 1.0),  # Arabic digits are digits
    (MEGABYTE + "<answer>1000</answer>", 1.0),
    (MEGABYTE, 0.0),
    ("<answer>" + MEGABYTE + "</answer>", 0.0),
]


@pytest.mark.parametrize(("response", "expected"), ANSWERS)
def test_answers_are_graded(response: str, expected: float) -> None:
    entry = {"question": "600 + 400", "answer": "1000", "metadata": {}}
    scored = compute_score("reasoning_gym/chain_sum", response, "1000", {"reasoning_gym": entry})
    assert scored["score"] == pytest.approx(expected)
    assert scored["acc"] == float(expected == 1.0)
