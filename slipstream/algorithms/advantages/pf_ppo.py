"""PF-PPO: resampling of responses by their scores. Called by the loop before the update."""

from __future__ import annotations

import torch
from torch import Tensor

METHODS = ("pow", "max_min", "max_random")


def pf_ppo_indices(
    scores: Tensor,
    *,
    reweight_method: str = "pow",
    weight_pow: float = 2.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """(B,) rows to train on, drawn with replacement by the odds of (B,) `scores` (+ 1e-8 each):

    - `pow`: |s|^weight_pow;
    - `max_min`: 1 for the highest and the lowest score, 0 for others;
    - `max_random`: 0.4 for the highest score, 0.1 for others.

    Source: PF-PPO, https://arxiv.org/abs/2409.06957, with VERL's odds.

    Raises:
        ValueError: an unknown method, no scores, or one that is not finite.
    """
    if reweight_method not in METHODS:
        raise ValueError(
            f"unknown PF-PPO reweight_method {reweight_method!r}; known: {', '.join(METHODS)}"
        )
    if scores.ndim != 1 or len(scores) == 0 or not bool(scores.isfinite().all()):
        raise ValueError(f"PF-PPO needs finite scores of shape (B,), got {tuple(scores.shape)}")
    s = scores.double()
    if reweight_method == "pow":
        odds = s.abs() ** weight_pow
    elif reweight_method == "max_min":
        odds = ((s == s.max()) | (s == s.min())).double()
    else:
        odds = torch.where(s == s.max(), 0.4, 0.1).double()
    return torch.multinomial(odds + 1e-8, len(s), replacement=True, generator=generator)
