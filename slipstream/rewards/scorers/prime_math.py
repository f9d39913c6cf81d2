r"""Scores NuminaMath problems (PRIME, Cui et al. 2025) with answers in a box or in words.

An answer is correct if it equals the ground truth in MATH's normal form, or by value (library
math-verify).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from slipstream.rewards.scorers import latex, math_verified
from slipstream.rewards.scorers.boxed import last_boxed
from slipstream.rewards.scorers.truth import text_of

_TAIL = 300
"""Characters at the end of a response that are searched for an answer in words."""

_MARKERS = (re.compile(r"answer\s*:", re.IGNORECASE), re.compile(r"\b(?:is|are|be)\b"))
"""Texts before an answer, the more reliable pattern first; the last match counts."""


def extract_answer(response: str) -> str | None:
    """Return the content of the last box, or if there is none an answer in words.

    That is the text after the last "answer:", else after the last "is", "are" or "be", up to the
    end of the line; of an equation, the part after the last "=".
    """
    boxed = last_boxed(response)
    if boxed is not None:
        return boxed.strip() or None
    tail = response[-_TAIL:]
    for marker in _MARKERS:
        found = list(marker.finditer(tail))
        if not found:
            continue
        lines = tail[found[-1].end() :].strip().split("\n", 1)
        answer = lines[0].rsplit("=", 1)[-1].strip().strip("$").strip()
        answer = answer.removesuffix(".").strip().strip("$").strip()
        if answer:
            return answer
    return None


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
) -> float:
    """Return 1.0 if the answer is correct, else 0.0.

    Raises ValueError if there is no ground truth or it cannot be parsed, and RewardError if
    math-verify is missing.
    """
    truth = text_of(ground_truth, "prime_math", data_source)
    # Fail at the first response if the library is missing, not at the first one that needs it.
    math_verified.check_installed()
    answer = extract_answer(solution_str)
    if answer is None:
        return 0.0
    if latex.same(answer, truth):
        return 1.0
    return math_verified.compute_score(data_source, rf"\boxed{{{answer}}}", truth)
