"""Questions with a short answer in `<answer>` tags, as Search-R1 (Jin et al. 2025) asks them.

Compared as SQuAD does (Rajpurkar et al. 2016): without case, punctuation and articles.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from typing import Any

_OPEN, _CLOSE = "<answer>", "</answer>"
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)

_MOST_TAGS = 10
"""A response with more of them guesses, and gets a quarter."""


def normalised(text: str) -> str:
    """Lower case, without punctuation and articles, single spaces."""
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def extract_answer(solution_str: str) -> str | None:
    """What is in the last pair of tags, or None."""
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
    """`score` for an answer among `ground_truth["target"]`, one or several; `format_score` for
    another one, 0.0 for none; with `part` a right answer within it is enough. A quarter of what is
    right where more than ten answers are opened.

    Raises ValueError where the ground truth has no target.
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
    given, wanted = normalised(answer), [normalised(str(a)) for a in accepted]
    if not (any(w in given for w in wanted) if part else given in wanted):
        return format_score
    return score / 4 if solution_str.count(_OPEN) > _MOST_TAGS else score
