"""Resampling of rows by their scores, so that an update sees the telling ones more often.

Called by the loop after the advantages of a whole batch. Knows nothing about rows but their scores.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.algorithms.advantages.groups import check_finite_scores
from slipstream.algorithms.settings import PFPPOConfig

WEIGHT_FLOOR = 1e-8
"""Added to each weight, so that a batch of zero scores can be drawn from too."""


def pf_ppo_weights(scores: Tensor, config: PFPPOConfig | None = None) -> Tensor:
    """(B,) float64 weights of rows with (B,) `scores`, not normalised, by `reweight_method`:

    - `pow`: |s|^weight_pow
    - `max_min`: 1 for the highest and the lowest score of the batch, else 0
    - `max_random`: 0.4 for the highest score of the batch, else 0.1

    each plus 1e-8.

    Source: PF-PPO, https://arxiv.org/abs/2409.06957, with VERL's weights.

    Raises:
        ValueError: `scores` are empty, not (B,), or not finite.
    """
    config = config or PFPPOConfig()
    if scores.ndim != 1 or not len(scores):
        raise ValueError(
            f"PF-PPO draws rows by one score each: got scores of shape {tuple(scores.shape)}"
        )
    score = scores.detach().double()
    check_finite_scores(score)
    if config.reweight_method == "pow":
        weights = score.abs().pow(config.weight_pow)
    elif config.reweight_method == "max_min":
        weights = ((score == score.max()) | (score == score.min())).double()
    else:
        weights = torch.full_like(score, 0.1).masked_fill(score == score.max(), 0.4)
    return weights + WEIGHT_FLOOR


def pf_ppo_indices(
    scores: Tensor,
    config: PFPPOConfig | None = None,
    *,
    generator: torch.Generator | None = None,
    seed: int | None = None,
) -> Tensor:
    """(B,) int64, on the CPU: rows drawn with replacement, each with probability `pf_ppo_weights`
    over their sum.

    Every rank must draw the same: give a `seed`, or a CPU `generator` in the same state.

    Source: PF-PPO, https://arxiv.org/abs/2409.06957.

    Raises:
        ValueError: as `pf_ppo_weights`, or not exactly one of `generator` and `seed`.
    """
    if (generator is None) == (seed is None):
        raise ValueError(
            "PF-PPO's draw must be the same on every rank and in every run: give a seed or a "
            "generator, and not both"
        )
    weights = pf_ppo_weights(scores, config).cpu()
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(weights, len(weights), replacement=True, generator=generator)
