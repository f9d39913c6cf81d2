"""verl's module `verl.utils.reward_score.math_verify`: answers compared by value."""

from __future__ import annotations

from typing import Any

from slipstream.rewards.scorers import math_verified
from slipstream.rewards.workers import CALL_TIMEOUT_S

__all__ = ["compute_score"]


def compute_score(
    model_output: str, ground_truth: Any, timeout_score: float = 0.0, timeout: float = 30.0
) -> float:
    """Return 1.0 if the answer has the value of the ground truth, else 0.0.

    The computation may need two seconds of CPU time, or half of `timeout` (in seconds) if that is
    less. Above this limit the score is `timeout_score`. Raises ValueError if the ground
    truth cannot be parsed, and RewardError if the package math-verify is missing.
    """
    outer = CALL_TIMEOUT_S.get()
    token = CALL_TIMEOUT_S.set(timeout if outer is None else min(timeout, outer))
    try:
        return math_verified.compute_score(
            "", model_output, ground_truth, timeout_score=timeout_score
        )
    finally:
        CALL_TIMEOUT_S.reset(token)
