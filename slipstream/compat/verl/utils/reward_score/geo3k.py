"""verl's module `verl.utils.reward_score.geo3k`: a think block and a boxed answer."""

from __future__ import annotations

from slipstream.rewards.scorers import geometry3k
from slipstream.rewards.scorers.boxed import last_boxed

__all__ = ["acc_reward", "compute_score", "format_reward"]


def format_reward(predict_str: str) -> float:
    """Return 1.0 if the response is a `<think>` block followed by a box, else 0.0."""
    return float(geometry3k.has_form(predict_str))


def acc_reward(predict_str: str, ground_truth: str, use_boxed: bool = True) -> float:
    """Return 1.0 if the answer has the value of the ground truth, else 0.0.

    The answer is the content of the last box, or the whole text if not `use_boxed`. Raises
    ValueError if there is no ground truth or it cannot be parsed, and RewardError if math-verify is
    missing.
    """
    answer = last_boxed(predict_str) if use_boxed else predict_str
    return float(geometry3k.is_right(answer, ground_truth))


def compute_score(
    predict_str: str, ground_truth: str, use_boxed: bool = True, format_score: float = 0.1
) -> float:
    """Return the sum of `acc_reward` and `format_reward`, weighted by 1 - `format_score` and
    `format_score`."""
    correct = acc_reward(predict_str, ground_truth, use_boxed)
    return (1.0 - format_score) * correct + format_score * format_reward(predict_str)
