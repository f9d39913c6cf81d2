"""verl's package `verl.utils.reward_score`: the functions that score texts by data source."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slipstream.compat.rewards import default_compute_score

__all__ = ["default_compute_score", "get_default_compute_score"]

_default_compute_score = default_compute_score


def get_default_compute_score(reward_name: str | None = None) -> Callable[..., Any]:
    """Return `default_compute_score`, for every reward manager."""
    return default_compute_score
