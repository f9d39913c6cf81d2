"""Scores questions with a short answer in `<answer>` tags (Search-R1, Jin et al. 2025).

Answers are compared as in SQuAD (Rajpurkar et al. 2016): case, punctuation and articles are
ignored.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from typing import Any

from slipstream.rewards.scorers.truth import accepted, text_of

_OPEN, _CLOSE = "<answer>", "</answer>"
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)

_MAX_TAGS = 10
"""A response with more opening or more closing tags is guessing and gets a quarter of the score."""


def normalised(text: str) -> str:
    """Return lower-case text without punctuation and articles, with single spaces."""
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def extract_answer(solution_str: str) -> str | None:
    """Return the content of the last pair of tags, or None."""
    start = solution_str.rfind(_OPEN, 0, max(solution_str.rfind(_CLOSE), 0))
    if start < 0:
        return None
    start += len(_OPEN)
    return solution_str[start : solution_str.index(_CLOSE, start)].strip()


def correct_answers(ground_truth: Any, data_source: str) -> list[str]:
    """Return the normal forms of the correct answers, `ground_truth["target"]`.

    Raises ValueError if the ground truth has no target.
    """
    target = ground_truth.get("target") if isinstance(ground_truth, Mapping) else None
    targets = [] if target is None else accepted(target)
    if not targets:
        raise ValueError(
            "search: ground truth must be {'target': [...]}, got "
            f"{ground_truth!r} (data_source {data_source!r})"
        )
    return [normalised(text_of(t, "search", data_source, empty=True)) for t in targets]


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    part: bool = False,
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Return `score` for a correct answer, `format_score` for a wrong one, 0.0 for none.

    `ground_truth["target"]` is one correct answer, or a list. With `part`, the response's answer
    only needs to contain it. With more than ten opening or closing tags, a correct answer gets
    `score / 4`. Raises ValueError if the ground truth has no target.
    """
    right = correct_answers(ground_truth, data_source)
    answer = extract_answer(solution_str)
    if answer is None:
        return 0.0
    given = normalised(answer)
    if not (any(t in given for t in right) if part else given in right):
        return format_score
    tags = max(solution_str.count(_OPEN), solution_str.count(_CLOSE))
    return score / 4 if tags > _MAX_TAGS else score
