"""Scores answers to reasoning-gym problems with the library's own rule for each generator.

Needs the extra `gym`. The answer is the content of the last `<answer>` tag.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from slipstream.errors import RewardError

PREFIX = "reasoning_gym/"
"""Prefix of the data sources, followed by the name of the generator."""


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return `score` from 0 to 1 (many generators give partial credit), and `acc`, 1 for score 1.

    `extra_info["reasoning_gym"]` is the problem (`question`, `answer`, `metadata`). Raises
    ValueError without it, and RewardError if the library is missing or has no such generator.
    """
    entry = (extra_info or {}).get("reasoning_gym")
    if not isinstance(entry, Mapping):
        raise ValueError(
            "extra_info has no 'reasoning_gym' with the problem (question, answer, metadata)"
        )
    score, extract = _grader(data_source.removeprefix(PREFIX))
    answer = extract(solution_str)
    value = float(score(answer, dict(entry)))
    return {"score": value, "acc": float(value >= 1.0), "pred": "" if answer is None else answer}


@cache
def _grader(name: str) -> tuple[Callable[..., float], Callable[[str], str | None]]:
    try:
        import reasoning_gym
        from reasoning_gym.utils import extract_answer
    except ImportError as error:
        raise RewardError(
            f"data_source {PREFIX}{name} needs the library reasoning-gym; install it with: pip "
            "install 'slipstream-rl[gym]'"
        ) from error
    try:
        return reasoning_gym.get_score_answer_fn(name), extract_answer
    except ValueError as error:
        raise RewardError(f"reasoning-gym has no generator {name!r}") from error
