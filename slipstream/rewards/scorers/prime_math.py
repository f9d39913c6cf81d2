r"""Scores NuminaMath problems (PRIME, Cui et al. 2025) with answers in a box or in words.

An answer is correct if it equals the ground truth in MATH's normal form, or by value (library
math-verify).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from slipstream.rewards.scorers import latex, math_verified, number
from slipstream.rewards.scorers.boxed import last_boxed
from slipstream.rewards.scorers.truth import text_of

_TAIL = 300
"""Characters at the end of a response that are searched for an answer in words."""

_MARKERS = (
    re.compile(r"answer\s*:|answers?\s+(?:is|are)\b\s*:?", re.IGNORECASE),
    re.compile(r"\b(?:is|are|be|get)\b|:\s|=(?!=)"),
)
"""Texts before an answer, the more reliable pattern first; the last match counts."""

_BEFORE = re.compile(r"(?:^|[.,:]\s)\s*([^.,:]+?)\s+(?:is|are) (?:the )?answers?\b", re.IGNORECASE)
"""An answer that is named before the marker: `5 is the answer`."""


def extract_answer(response: str) -> str | None:
    """Return the content of the last box, or if there is none an answer in words.

    That is the text after the last "answer:" or "answer is", else before "is the answer", else
    after the last "is", "are", "be", "get", "=" or colon, up to the end of the sentence or line; of
    an equation, the part after the last "=". Without any of these it is the whole response, if that
    has at most 300 characters, as in verl.
    """
    boxed = last_boxed(response)
    if boxed is not None:
        return boxed.strip() or None
    tail = response.strip()[-_TAIL:]
    marked = False
    for marker in _MARKERS:
        found = list(marker.finditer(tail))
        marked = marked or bool(found)
        if found and (answer := _sentence(tail[found[-1].end() :])):
            return answer
        if not marked and (before := _BEFORE.findall(tail)):
            return _sentence(before[-1])
    if marked or "\\boxed" in response or len(response.strip()) > _TAIL:
        return None
    return _sentence(tail)


def _sentence(text: str) -> str | None:
    """Return the first line up to the end of a sentence; of an equation, the last side."""
    line = text.strip().split("\n", 1)[0].split(". ", 1)[0]
    side = line.rsplit("=", 1)[-1].strip().removesuffix(".").strip()
    # The delimiter at the other end is before the marker or the equals sign.
    for opening, closing in (("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        if side.count(opening) < 2 and (opening == closing or opening not in side):
            side = side.removesuffix(closing)
    return number.unwrapped(side) or None


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
