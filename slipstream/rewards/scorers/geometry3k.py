r"""Scores geometry problems (Geometry3K, Lu et al. 2021).

The expected response is a `<think>` block, followed by a boxed answer. The weights are verl's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from slipstream.rewards.scorers.boxed import last_boxed
from slipstream.rewards.scorers.latex import same
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

    Raises ValueError if there is no ground truth.
    """
    truth = text_of(ground_truth, "geometry3k", data_source)
    answer = last_boxed(solution_str)
    right = answer is not None and same(answer, truth)
    return (1 - _FORM_WEIGHT) * right + _FORM_WEIGHT * has_form(solution_str)
