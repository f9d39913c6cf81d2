"""What the policy losses share: checked and masked inputs, log-ratios, aggregation, metrics.

Called by the losses of this package only. Knows nothing about any objective.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.algorithms.aggregation import (
    LossAggMode,
    Normalizers,
    masked_sum,
    sum_loss,
    zero_masked,
)
from slipstream.algorithms.registry import LossMetrics
from slipstream.algorithms.settings import PolicyLossConfig

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to +- this before exp, as everywhere in the field: e^20 is far outside
every clip range, and the exponential of more overflows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTerms:
    """The rows of one call, all (B, T) and 0 where `mask` is 0, whatever the caller had there.

    `raw_log_ratio` is k = log_prob - old_log_prob, `log_ratio` the same within +-20. `weights` are
    importance weights without gradient.
    """

    log_prob: Tensor
    old_log_prob: Tensor
    advantages: Tensor
    mask: Tensor
    weights: Tensor | None
    config: PolicyLossConfig
    norm: Normalizers

    @property
    def raw_log_ratio(self) -> Tensor:
        return self.log_prob - self.old_log_prob

    @property
    def log_ratio(self) -> Tensor:
        return self.raw_log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)

    def aggregate(self, loss_mat: Tensor, mode: str | LossAggMode) -> Tensor:
        """This call's share of the mini-batch's loss, from the weighted (B, T) `loss_mat`."""
        if self.weights is not None:
            loss_mat = loss_mat * self.weights
        return sum_loss(loss_mat, self.mask, mode, self.norm)

    @torch.no_grad()
    def share(self, values: Tensor) -> Tensor:
        """This call's share of the mean of `values` over the mini-batch's target tokens."""
        return masked_sum(values.to(self.log_prob.dtype), self.mask) / self.norm.num_tokens

    def metrics(
        self, clipped: Tensor | None = None, clipped_lower: Tensor | None = None
    ) -> LossMetrics:
        """VERL's three: shares of tokens that a clip binds on, and the mean of -k. A loss without
        such a clip reports 0."""
        return {
            "actor/pg_clipfrac": 0.0 if clipped is None else self.share(clipped),
            "actor/ppo_kl": self.share(-self.log_ratio),
            "actor/pg_clipfrac_lower": 0.0 if clipped_lower is None else self.share(clipped_lower),
        }


def token_terms(
    old_log_prob: Tensor | None,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: PolicyLossConfig | None,
    rollout_is_weights: Tensor | None = None,
) -> TokenTerms:
    """Check the arguments of a policy loss and put 0 into their masked places; `config` may be
    VERL's, see `PolicyLossConfig.of`.

    Zeroing comes before any arithmetic: behind a product, a masked NaN would still reach the
    gradient of the other factor. A missing `old_log_prob` is the policy itself.

    Raises:
        ValueError: shapes differ, or no target token and no `config.normalizers`.
    """
    config = PolicyLossConfig.of(config, width=response_mask.shape[-1])
    named = {
        "old_log_prob": old_log_prob,
        "log_prob": log_prob,
        "advantages": advantages,
        "response_mask": response_mask,
        "rollout_is_weights": rollout_is_weights,
    }
    shapes = {name: tuple(value.shape) for name, value in named.items() if value is not None}
    if len(set(shapes.values())) > 1 or log_prob.ndim != 2:
        raise ValueError(f"a policy loss takes (B, T) tensors of one shape, got {shapes}")
    if old_log_prob is None:
        old_log_prob = log_prob.detach()
    norm = config.normalizers or Normalizers.from_mask(
        response_mask, horizon=config.loss_scale_factor
    )
    weights = rollout_is_weights
    return TokenTerms(
        log_prob=zero_masked(log_prob, response_mask),
        old_log_prob=zero_masked(old_log_prob, response_mask),
        advantages=zero_masked(advantages, response_mask),
        mask=response_mask,
        weights=None if weights is None else zero_masked(weights.detach(), response_mask),
        config=config,
        norm=norm,
    )


def clipped_objective(
    ratio: Tensor, advantages: Tensor, config: PolicyLossConfig
) -> tuple[Tensor, Tensor]:
    """(max(-A r, -A clip(r, 1 - low, 1 + high)), where the clipped one is the larger).

    Source: PPO, https://arxiv.org/abs/1707.06347, eq. 7.
    """
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(*config.clip_bounds)
    return torch.maximum(unclipped, clipped), clipped > unclipped


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """(B,) means over each row's target tokens; 0 for rows without any."""
    count = mask.sum(dim=-1)
    return masked_sum(values, mask, dim=-1) / torch.where(count > 0, count, 1)
