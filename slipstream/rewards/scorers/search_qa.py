"""Scores questions with a short answer in `<answer>` tags (Search-R1, Jin et al. 2025).

Answers are compared as in SQuAD (Rajpurkar et al. 2016): case, punctuation and articles are
ignored.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from typing import Any

_OPEN, _CLOSE = "<answer>", "</answer>"
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)

_MAX_TAGS = 10
"""A response with more answer tags is guessing and gets a quarter of the score."""


def normalised(text: str) -> str:
    """Return lower-case text without punctuation and articles, with single spaces."""
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def extract_answer(solution_str: str) -> str | None:
    """Return the content of the last pair of tags, or None."""
    end = solution_str.rfind(_CLOSE)
    start = solution_str.rfind(_OPEN, 0, end) if end >= 0 else -1
    return solution_str[start + len(_OPEN) : end].strip() if start >= 0 else None


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
    only needs to contain it. With more than ten opening tags, a correct answer gets `score / 4`.
    Raises ValueError if the ground truth has no target.
    """
    target = ground_truth.get("target") if isinstance(ground_truth, Mapping) else None
    if target is None:
        raise ValueError(
            "search: ground truth must be {'target': [...]}, got "
            f"{ground_truth!r} (data_source {data_source!r})"
        )
    accepted = [target] if isinstance(target, str) else list(target)
    answer = extract_answer(solution_str)
    if answer is None:
        return 0.0
    given, targets = normalised(answer), [normalised(str(a)) for a in accepted]
    if not (any(t in given for t in targets) if part else given in targets):
        return format_score
    return score / 4 if solution_str.count(_OPEN) > _MAX_TAGS else score
