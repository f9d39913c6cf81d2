"""verl's module `verl.utils.reward_score.gsm8k`: a number after `####`."""

from __future__ import annotations

import re
from typing import Any, Literal

from slipstream.rewards.scorers import gsm8k as scorer

__all__ = ["compute_score", "extract_solution"]

_TAIL = 300
"""Characters at the end of a response that are read."""

_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_FLEXIBLE = re.compile(r"-?[0-9.,]+")


def extract_solution(
    solution_str: str, method: Literal["strict", "flexible"] = "strict"
) -> str | None:
    """Return the answer in the last 300 characters as it is written; None without one.

    `strict` is the last number after `#### `, without commas. `flexible` is the last text of
    digits, points and commas other than a single point. Raises ValueError for another method.
    """
    if method not in ("strict", "flexible"):
        raise ValueError(f"method={method!r} is unknown; use strict or flexible")
    tail = solution_str[-_TAIL:]
    if method == "strict":
        found = [text.replace(",", "") for text in _STRICT.findall(tail)]
    else:
        found = [text for text in _FLEXIBLE.findall(tail) if text != "."]
    return found[-1] if found else None


def compute_score(
    solution_str: str,
    ground_truth: Any,
    method: Literal["strict", "flexible"] = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Return `score` for the correct answer, `format_score` for a wrong one, 0.0 for none.

    The built-in function of GSM8K finds and compares answers: it is more lenient than
    `extract_solution`. Raises ValueError if there is no ground truth.
    """
    return scorer.compute_score(
        "", solution_str, ground_truth, method=method, format_score=format_score, score=score
    )
