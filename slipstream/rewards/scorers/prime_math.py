r"""Mathematics of NuminaMath (PRIME, Cui et al. 2025): answers in a box, or in words.

An answer is right where it is written as the ground truth is (MATH's rules), or has its value (the
library math-verify).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from slipstream.rewards.scorers import latex, math_verified
from slipstream.rewards.scorers.boxed import last_boxed
from slipstream.rewards.scorers.truth import text_of

_TAIL = 300
"""Characters at the end of a response in which an answer in words is looked for."""

_MARKERS = (re.compile(r"answer\s*:", re.IGNORECASE), re.compile(r"\b(?:is|are|be)\b"))
"""What an answer follows, the likelier one first; the last of its kind counts."""


def extract_answer(response: str) -> str | None:
    """What is in the last box; else what follows the last "answer:", else the last "is", of the
    last lines, and in it what follows the last "="."""
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
    """1.0 where the answer is right, else 0.0. Raises ValueError where there is no ground truth, or
    one that cannot be read, and RewardError where math-verify is missing."""
    truth = text_of(ground_truth, "prime_math", data_source)
    # Said before any response is scored, not at the first one that is written in another way.
    math_verified.library()
    answer = extract_answer(solution_str)
    if answer is None:
        return 0.0
    if latex.same(answer, truth):
        return 1.0
    return math_verified.compute_score(data_source, rf"\boxed{{{answer}}}", truth)
