"""verl's module `verl.utils.reward_score.search_r1_like_qa_em`: answers in `<answer>` tags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.rewards.scorers import search_qa as scorer

__all__ = [
    "compute_score",
    "compute_score_subem",
    "count_answer_tags",
    "em_check",
    "extract_solution",
    "normalize_answer",
    "subem_check",
]


def normalize_answer(s: str) -> str:
    """Return lower-case text without punctuation and articles, with single spaces."""
    return scorer.normalised(s)


def extract_solution(solution_str: str) -> str | None:
    """Return the content of the last pair of answer tags, or None."""
    return scorer.extract_answer(solution_str)


def em_check(prediction: str, golden_answers: str | Sequence[str]) -> int:
    """Return 1 if the normal form of the prediction is that of one of the answers, else 0."""
    return int(normalize_answer(prediction) in _forms(golden_answers))


def subem_check(prediction: str, golden_answers: str | Sequence[str]) -> int:
    """Return 1 if the normal form of the prediction contains that of one of the answers, else 0."""
    given = normalize_answer(prediction)
    return int(any(form in given for form in _forms(golden_answers)))


def count_answer_tags(text: str) -> tuple[int, int]:
    """Return the numbers of opening and closing answer tags."""
    return text.count("<answer>"), text.count("</answer>")


def compute_score(
    solution_str: str,
    ground_truth: Mapping[str, Any],
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Return `score` for a correct answer, `format_score` for a wrong one, 0.0 for none.

    `ground_truth["target"]` has the correct answers. With more than ten tags a correct answer gets
    a quarter of `score`. `method` is unused, as in verl. Raises ValueError without a target.
    """
    return scorer.compute_score(
        "", solution_str, ground_truth, format_score=format_score, score=score
    )


def compute_score_subem(
    solution_str: str,
    ground_truth: Mapping[str, Any],
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Like `compute_score`, but the response's answer only needs to contain a correct one.

    The number of tags does not matter.
    """
    right = scorer.correct_answers(ground_truth, "")
    answer = extract_solution(solution_str)
    if answer is None:
        return 0.0
    return score if subem_check(answer, right) else format_score


def _forms(answers: str | Sequence[str]) -> list[str]:
    return [normalize_answer(a) for a in ([answers] if isinstance(answers, str) else answers)]
