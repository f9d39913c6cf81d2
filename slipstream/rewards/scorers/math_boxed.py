r"""Scores math problems with a boxed answer (MATH, Hendrycks et al. 2021)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.rewards.scorers.boxed import last_boxed
from slipstream.rewards.scorers.latex import same
from slipstream.rewards.scorers.truth import text_of


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
) -> float:
    """Return 1.0 if the last box equals the ground truth after `latex.normalised`, else 0.0.

    Raises ValueError if there is no ground truth.
    """
    truth = text_of(ground_truth, "math", data_source)
    answer = last_boxed(solution_str)
    return 1.0 if answer is not None and same(answer, truth) else 0.0
