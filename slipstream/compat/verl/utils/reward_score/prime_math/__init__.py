"""verl's package `verl.utils.reward_score.prime_math`: answers in a box or in words."""

from __future__ import annotations

from typing import Any

from slipstream.compat.verl.utils.reward_score.boxes import BOXED, unwrapped
from slipstream.compat.verl.utils.reward_score.prime_math.grader import grade_answer, math_equal
from slipstream.rewards.scorers import prime_math as scorer
from slipstream.rewards.scorers.boxed import last_boxed

__all__ = ["compute_score", "grade_answer", "match_answer", "math_equal", "remove_boxed"]


def compute_score(model_output: Any, ground_truth: Any) -> tuple[bool, bool, str]:
    """Return whether the answer is correct, whether its format is, and the answer.

    The format is correct if the answer is, or if the response has a text "Step 2:" and a box.
    Raises ValueError if there is no ground truth or it cannot be parsed, and RewardError if the
    package math-verify is missing.
    """
    text = str(model_output)
    correct = bool(scorer.compute_score("", text, ground_truth))
    formatted = correct or ("Step 2:" in text and r"\box" in text)
    return correct, formatted, match_answer(text)[1]


def match_answer(response: str) -> tuple[bool, str]:
    """Return whether an answer with a digit was found in a response, and the answer.

    Without an answer in a box or in words, it is the whole response.
    """
    answer = scorer.extract_answer(response)
    if answer is None or answer == response.strip():
        return False, response
    return any(c.isdigit() for c in answer), answer


def remove_boxed(s: str) -> str | None:
    r"""Return the content of `\boxed{...}`; None for other texts."""
    try:
        return unwrapped(s, BOXED)
    except AssertionError:
        return None


def _last_boxed_only_string(string: str) -> str | None:
    """Return the content of the last box without white space around it; None without a box."""
    content = last_boxed(string)
    return None if content is None else content.strip()
