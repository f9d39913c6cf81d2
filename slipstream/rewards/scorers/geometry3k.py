r"""Scores geometry problems (Geometry3K, Lu et al. 2021).

The expected response is a `<think>` block, followed by a boxed answer. As in verl, answers are
compared by value: `\sqrt{8}` equals `2\sqrt{2}`. The weights are verl's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from slipstream.rewards.scorers import latex, math_verified, number
from slipstream.rewards.scorers.boxed import last_boxed
from slipstream.rewards.scorers.truth import text_of

_FORM_WEIGHT = 0.1

_THINK = re.compile(r"\A\s*<think>.*?</think>", re.DOTALL)


def has_form(solution_str: str) -> bool:
    """Return whether a response is a think block followed by a box."""
    thought = _THINK.match(solution_str)
    return thought is not None and last_boxed(solution_str[thought.end() :]) is not None


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
) -> float:
    """Return 0.9 for the correct answer in the last box, plus 0.1 for the correct format.

    Raises ValueError if there is no ground truth or it cannot be parsed, and RewardError if
    math-verify is missing.
    """
    right = is_right(last_boxed(solution_str), ground_truth, data_source)
    return (1 - _FORM_WEIGHT) * right + _FORM_WEIGHT * has_form(solution_str)


def is_right(answer: str | None, ground_truth: Any, data_source: str = "") -> bool:
    """Return whether an answer equals the ground truth, as LaTeX or by value; None does not.

    Raises errors as `compute_score` does.
    """
    truth = text_of(ground_truth, "geometry3k", data_source)
    # Fail at the first response if the library is missing, not at the first one that needs it.
    math_verified.check_installed()
    return answer is not None and (
        latex.same(answer, truth) or _same_value(data_source, answer, truth)
    )


def _same_value(data_source: str, answer: str, truth: str) -> bool:
    """Compare by value what is not a plain number: a fraction must have its lowest terms."""
    if number.read(answer) is not None and number.read(truth) is not None:
        return False
    return math_verified.compute_score(data_source, rf"\boxed{{{answer}}}", truth) == 1.0
