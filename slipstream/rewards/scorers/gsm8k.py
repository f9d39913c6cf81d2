"""Scores GSM8K word problems (Cobbe et al. 2021), whose answer is a number after `####`.

The two extraction methods, and reading only the end of the response, follow verl's scorer. Unlike
it, this scorer compares numbers by value, so that `18.00`, `$18` and `18.` all equal 18.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from slipstream.errors import ConfigError
from slipstream.rewards.scorers import number
from slipstream.rewards.scorers.truth import text_of

_TAIL = 300
_MARK = "#### "
_CURRENCY = r"(?:\\?\$|[€£¥₹])"
_STRICT = re.compile(rf"{_MARK}(?=(?:[-+\u2212\u2013] ?)?(?:{_CURRENCY} ?)*[-+\u2212]?\.?[0-9])")
_FLEXIBLE = re.compile(rf"[-\u2212]?{_CURRENCY}?[0-9.,]+")
_UNREADABLE = re.compile(r"-?[0-9.,$]+")


def extract_answer(
    solution_str: str, method: Literal["strict", "flexible"] = "strict"
) -> str | None:
    """Return the final number in the last 300 characters, without commas and currency, or None.

    `strict` uses the last number after `#### `; `flexible` the last text that looks like a number.
    """
    tail = solution_str[-_TAIL:]
    if method == "strict":
        found = [tail[mark.end() :] for mark in _STRICT.finditer(tail)]
    elif method == "flexible":
        matches = _FLEXIBLE.findall(tail)
        found = [text for text in matches if any(c.isdigit() for c in text)]
    else:
        raise ConfigError(f"gsm8k: unknown method {method!r}; use strict or flexible")
    return _plain_number(found[-1]) if found else None


def _plain_number(text: str) -> str:
    """Return the number at the beginning of a text, or the characters that look like one."""
    while text.startswith(("$$", r"\$\$")):  # math delimiters, not a currency
        text = text[1:]
    if (read := number.leading(text)) is not None:
        return read.text
    found = _UNREADABLE.match(text)
    return text.strip() if found is None else found[0]


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

    Answers are compared by value (see `number`). Raises ValueError if there is no ground truth.
    """
    truth = text_of(ground_truth, "gsm8k", data_source)
    answer = extract_answer(solution_str, method)
    if answer is None:
        return 0.0
    return score if answer == truth or number.same(answer, truth) else format_score
