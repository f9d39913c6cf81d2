"""GDPO: advantages of several reward components, normalized separately before they are added."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.algorithms.advantages.groups import check_keywords, check_shapes, finish, required
from slipstream.algorithms.advantages.grpo import GRPO_EPS, divides_by_std, relative_scores
from slipstream.algorithms.advantages.whiten import masked_whiten
from slipstream.algorithms.registry import AdvantageEstimator, AdvantageNeed, register_adv_est
from slipstream.algorithms.settings import AdvantageConfig

RewardParts = Mapping[str, Tensor | Sequence[float]]


@register_adv_est(AdvantageEstimator.GDPO, needs=[AdvantageNeed.REWARD_PARTS])
def gdpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Iterable[Hashable],
    epsilon: float = GRPO_EPS,
    norm_adv_by_std_in_grpo: bool | None = None,
    config: AdvantageConfig | None = None,
    reward_parts: RewardParts | None = None,
    non_tensor_batch: RewardParts | None = None,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    """A = whiten(sum_k w_k A_k), where A_k are the advantages of `grpo` for the k-th component.

    `reward_parts` (VERL: `non_tensor_batch`) maps names to B numbers. The components are those of
    `config.gdpo_reward_keys`, the weights w those of `config.gdpo_reward_weights`.
    `token_level_rewards` only sets the dtype of the result. Whitening is over the target tokens of
    the given rows, so pass the whole batch. Shapes are as in `AdvantageFn`. The returns equal A.

    Source: GDPO, https://arxiv.org/abs/2601.05242.

    Raises:
        ValueError: names or components are missing, there are fewer than two target tokens, shapes
            differ, or a component is not finite.
    """
    check_keywords("gdpo", more)
    config = AdvantageConfig.of(config)
    given = non_tensor_batch if reward_parts is None else reward_parts
    parts = required("gdpo", AdvantageNeed.REWARD_PARTS, given)
    check_shapes(token_level_rewards=token_level_rewards, response_mask=response_mask)
    keys = list(config.gdpo_reward_keys or ())
    if not keys:
        raise ValueError(
            f"advantage estimator 'gdpo' needs algorithm.gdpo_reward_keys, got none; set it to "
            f"reward components out of {', '.join(sorted(parts)) or 'none given'}"
        )
    weights = config.gdpo_reward_weights
    by_std = divides_by_std(norm_adv_by_std_in_grpo, config)
    index = index.tolist() if isinstance(index, Tensor) else list(index)
    combined = torch.zeros(len(response_mask), dtype=torch.float64, device=response_mask.device)
    for key, weight in zip(keys, [1.0] * len(keys) if weights is None else weights, strict=True):
        scores = _component(parts, key).to(combined)
        try:
            combined += weight * relative_scores(scores, index, by_std, epsilon)
        except ValueError as error:
            raise ValueError(f"reward component {key!r}: {error}") from error
    tokens = combined.unsqueeze(-1).expand(response_mask.shape)
    advantages = finish(masked_whiten(tokens, response_mask), response_mask, token_level_rewards)
    return advantages, advantages.clone()


def _component(parts: RewardParts, key: str) -> Tensor:
    if key not in parts:
        raise ValueError(
            f"algorithm.gdpo_reward_keys names {key!r}, which the reward function did not return; "
            f"it returned {', '.join(sorted(parts)) or 'no components'}"
        )
    value = parts[key]
    # Not `torch.as_tensor`, because arrays of VERL's batches have dtype object.
    return value if isinstance(value, Tensor) else _column(value)


def _column(values: Iterable[float]) -> Tensor:
    return torch.tensor([float(value) for value in values], dtype=torch.float64)
