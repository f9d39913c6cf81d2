"""GPG: advantages of group policy gradients."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

from slipstream.algorithms.advantages.groups import (
    check_keywords,
    group_scores,
    sequence_scores,
    to_tokens,
)
from slipstream.algorithms.registry import AdvantageEstimator, register_adv_est


@register_adv_est(AdvantageEstimator.GPG)
def gpg(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Iterable[Hashable],
    epsilon: float | None = None,
    f_norm: float = 1.0,
    alpha: float | None = None,
    config: object = None,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    """A_i = alpha (s_i - mean_g) / f_norm, alpha = B / max(number of non-zero scores, 1). In a
    group of one, A_i = alpha s_i / f_norm.

    alpha counts over the given rows, so pass the whole batch. Shapes are as in `AdvantageFn`. The
    parameters `epsilon` and `alpha` are unused, as in VERL.

    Source: GPG, https://arxiv.org/abs/2504.02546, as VERL computes it.

    Raises:
        ValueError: shapes differ, or a score is not finite.
    """
    check_keywords("gpg", more)
    group = group_scores(sequence_scores(token_level_rewards, response_mask), index)
    scale = len(group.score) / max(int((group.score != 0).sum()), 1)
    relative = torch.where(group.count > 1, group.centered, group.score)
    return to_tokens(scale * relative / f_norm, response_mask, token_level_rewards)
