"""PF-PPO: resample the rows of a batch by their scores, so that informative rows occur more often.

The loop calls this after the advantages of a whole batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.algorithms.advantages.groups import check_finite_scores
from slipstream.algorithms.settings import PFPPOConfig

WEIGHT_FLOOR = 1e-8
"""Added to each weight, so that a batch in which all scores are 0 can be sampled, too."""


def pf_ppo_weights(scores: Tensor, config: PFPPOConfig | None = None) -> Tensor:
    """Unnormalized weights (B,) in float64 of rows with `scores` (B,), by `reweight_method`:

    - `pow`: |s|^weight_pow
    - `max_min`: 1 for the highest and the lowest score of the batch, else 0
    - `max_random`: 0.4 for the highest score of the batch, else 0.1

    1e-8 is added to each weight.

    Source: PF-PPO, https://arxiv.org/abs/2409.06957, with VERL's weights.

    Raises:
        ValueError: `scores` are empty, not (B,), or not finite.
    """
    config = config or PFPPOConfig()
    if scores.ndim != 1 or not len(scores):
        raise ValueError(
            f"PF-PPO needs one score per row: got scores of shape {tuple(scores.shape)}"
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
    """Sample B row indices (B,) with replacement, int64 on the CPU. Probabilities are proportional
    to `pf_ppo_weights`.

    All ranks must draw the same rows: pass the same `seed`, or a CPU `generator` in the same state.

    Source: PF-PPO, https://arxiv.org/abs/2409.06957.

    Raises:
        ValueError: as `pf_ppo_weights`, or not exactly one of `generator` and `seed`.
    """
    if (generator is None) == (seed is None):
        raise ValueError(
            "PF-PPO must draw the same rows on every rank and in every run: pass either seed or "
            "generator"
        )
    weights = pf_ppo_weights(scores, config).cpu()
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(weights, len(weights), replacement=True, generator=generator)
