"""verl's module `verl.utils.reward_score.prime_math.grader`: whether two answers are equal."""

from __future__ import annotations

import math
import re
from typing import Any

from slipstream.rewards.scorers import latex, math_verified

__all__ = ["grade_answer", "math_equal"]

_NUMBER = re.compile(r"-?\d+(,\d{3})*(\.\d+)?|-?\.\d+")


def grade_answer(given_answer: str | None, ground_truth: str) -> bool:
    """Return whether an answer equals the ground truth in MATH's normal form, or by value.

    Raises ValueError if the ground truth cannot be parsed, and RewardError if the package
    math-verify is missing.
    """
    if given_answer is None:
        return False
    if latex.same(given_answer, ground_truth):
        return True
    return bool(math_verified.compute_score("", rf"\boxed{{{given_answer}}}", ground_truth))


def math_equal(
    prediction: Any,
    reference: Any,
    include_percentage: bool = True,
    tolerance: float = 1e-4,
    timeout: Any = None,
    pi: float = math.pi,
) -> bool:
    r"""Return whether two answers are equal.

    Numbers are equal up to the relative `tolerance`. With `include_percentage`, a prediction may be
    100 times the reference, or a hundredth of it. `\pi` is `pi` if the rest is a number. Other
    answers are compared by `grade_answer`, whose errors this function raises. `timeout` is
    accepted and unused: the computation has a limit of two seconds of CPU time.
    """
    given, wanted = _number(prediction, pi), _number(reference, pi)
    if given is None or wanted is None:
        return grade_answer(str(prediction), str(reference))
    scales = (0.01, 1.0, 100.0) if include_percentage else (1.0,)
    return any(math.isclose(given, wanted * scale, rel_tol=tolerance) for scale in scales)


def _number(value: Any, pi: float) -> float | None:
    text = str(value).strip().strip("$").removesuffix("%").removesuffix("\\").strip()
    factor = 1.0
    if text.endswith(r"\pi"):
        text, factor = text.removesuffix(r"\pi") or "1", pi
    if not _NUMBER.fullmatch(text):
        return None
    return float(text.replace(",", "")) * factor
