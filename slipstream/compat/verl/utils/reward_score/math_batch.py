"""verl's module `verl.utils.reward_score.math_batch`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream.compat.verl.utils.reward_score.math_reward import compute_score

__all__ = ["compute_score_batched"]


def compute_score_batched(
    data_sources: Sequence[str],
    solution_strs: Sequence[str],
    ground_truths: Sequence[Any],
    extra_infos: Sequence[Any],
    **kwargs: Any,
) -> list[float]:
    """Return `math_reward.compute_score` of each response. Further keywords are unused."""
    return [compute_score(*pair) for pair in zip(solution_strs, ground_truths, strict=True)]
