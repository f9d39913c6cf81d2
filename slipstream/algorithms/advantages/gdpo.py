"""GDPO: each part of the reward is normalised by itself. Called through the registry."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from slipstream.algorithms.advantages.groups import as_given
from slipstream.algorithms.advantages.grpo import relative_scores
from slipstream.algorithms.advantages.whiten import masked_whiten
from slipstream.algorithms.registry import AdvantageEstimator, AdvantageNeed, register_adv_est
from slipstream.algorithms.settings import AdvantageConfig


@register_adv_est(AdvantageEstimator.GDPO, needs=[AdvantageNeed.REWARD_PARTS])
def gdpo(
    *,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Iterable[Hashable],
    config: AdvantageConfig | None = None,
    reward_parts: Mapping[str, Any] | None = None,
    non_tensor_batch: Mapping[str, Any] | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """A = whiten over the batch of sum_k w_k A_k, A_k that of `grpo` on part k of the reward.

    `reward_parts` (or, as VERL passes them, `non_tensor_batch`) has B numbers for each of
    `config.gdpo_reward_keys`; weights are `config.gdpo_reward_weights`, 1 without. Shapes as in
    `AdvantageFn`.

    Source: GDPO, https://arxiv.org/abs/2601.05242.

    Raises:
        ValueError: no keys, a part that is not there, or another number of weights.
    """
    config = config or AdvantageConfig()
    keys = config.gdpo_reward_keys
    parts = reward_parts if reward_parts is not None else non_tensor_batch or {}
    if not keys:
        raise ValueError(
            "gdpo needs the names of reward parts; set algorithm.gdpo_reward_keys=[PART,...]"
        )
    weights = config.gdpo_reward_weights or (1.0,) * len(keys)
    if len(weights) != len(keys):
        raise ValueError(
            f"gdpo: {len(weights)} weights for {len(keys)} parts; give one each in "
            "algorithm.gdpo_reward_weights, or none"
        )
    rows = list(index)
    total = torch.zeros(len(rows), dtype=torch.float64, device=response_mask.device)
    for key, weight in zip(keys, weights, strict=True):
        if key not in parts:
            raise ValueError(
                f"gdpo: the reward function gives no part {key!r} (it gives: "
                f"{', '.join(sorted(parts)) or 'none'}); return it beside the score, or change "
                "algorithm.gdpo_reward_keys"
            )
        scores = torch.as_tensor(parts[key], dtype=torch.float64, device=total.device)
        total += weight * relative_scores(scores, rows, config)
    tiled = total.unsqueeze(-1).expand(response_mask.shape)
    return as_given(masked_whiten(tiled, response_mask), token_level_rewards)
