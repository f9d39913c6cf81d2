"""Scores GSM8K word problems (Cobbe et al. 2021), whose answer is a number after `####`.

The two extraction methods, and reading only the end of the response, follow verl's scorer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from slipstream.errors import ConfigError
from slipstream.rewards.scorers.truth import text_of

_TAIL = 300
_STRICT = re.compile(r"#### (-?[0-9.,$]+)")
_FLEXIBLE = re.compile(r"-?[0-9.,]+")


def extract_answer(
    solution_str: str, method: Literal["strict", "flexible"] = "strict"
) -> str | None:
    """Return the final number in the last 300 characters, without commas and `$`, or None.

    `strict` uses the last number after `#### `; `flexible` the last text that looks like a number.
    """
    tail = solution_str[-_TAIL:]
    if method == "strict":
        found = _STRICT.findall(tail)
        return _plain_number(found[-1]) if found else None
    if method != "flexible":
        raise ConfigError(f"gsm8k: unknown method {method!r}; use strict or flexible")
    found = [text for text in _FLEXIBLE.findall(tail) if any(c.isdigit() for c in text)]
    return _plain_number(found[-1]) if found else None


def _plain_number(text: str) -> str:
    return text.replace(",", "").replace("$", "").rstrip(".")


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    method: Literal["strict", "flexible"] = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Return `score` for the correct final answer, `format_score` for a wrong one, 0.0 for none.

    Answers are compared as text, without commas and `$`. Raises ValueError if there is no ground
    truth.
    """
    truth = text_of(ground_truth, "gsm8k", data_source)
    answer = extract_answer(solution_str, method)
    if answer is None:
        return 0.0
    return score if answer == _plain_number(truth) else format_score
