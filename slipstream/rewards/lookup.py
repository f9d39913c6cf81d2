"""Checks answers of the lookup task: the last `answer NAME` of a response.

Does not know tokens, tables or tools. Called by the reward functions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from slipstream.rewards.scorers.truth import text_of

_ANSWER = re.compile(r"(?<![\w<])answer(?![\w>])\s*:?\s*([a-z]+)")


def answer_of(text: str) -> str | None:
    """Return the name after the last word "answer"; None if there is none."""
    found = _ANSWER.findall(text)
    return str(found[-1]) if found else None


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return 1.0 as `score` and `acc` if the answer is the name `ground_truth`, else 0.0.

    Raises ValueError if there is no ground truth.
    """
    truth = text_of(ground_truth, "lookup", data_source)
    answer = answer_of(solution_str)
    right = float(answer == truth)
    return {"score": right, "acc": right, "pred": answer or ""}
