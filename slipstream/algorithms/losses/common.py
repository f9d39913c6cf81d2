"""Shared parts of the policy losses: checked and masked inputs, log-ratios, sums and metrics."""

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
"""Log-ratios are clamped to +- this before exp, as is usual: e^20 is far outside every clip range,
and exp of large values overflows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTerms:
    """The inputs of one call of a loss, all (B, T) and set to 0 where `mask` is 0.

    `weights` are importance weights without gradient.
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
        """k = log_prob - old_log_prob."""
        return self.log_prob - self.old_log_prob

    @property
    def log_ratio(self) -> Tensor:
        """k, clamped to +-20."""
        return self.raw_log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)

    def aggregate(self, loss_mat: Tensor, mode: str | LossAggMode) -> Tensor:
        """This call's share of the mini-batch's loss. `loss_mat` (B, T) is multiplied by the
        weights first."""
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
        """VERL's three metrics: the shares of clipped tokens (0 for a loss without such a clip),
        and the mean of -k."""
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
    """Check the arguments of a policy loss, and set their masked positions to 0.

    Masked values are zeroed before any arithmetic, because a masked NaN in a product would still
    reach the gradient of the other factor. If `old_log_prob` is None, it is `log_prob` itself.
    `config` may also be VERL's (`PolicyLossConfig.of`).

    Raises:
        ValueError: shapes differ, or there is neither a target token nor `config.normalizers`.
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
        raise ValueError(f"a policy loss needs (B, T) tensors of one shape, got {shapes}")
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
    """(max(-A r, -A clip(r, 1 - low, 1 + high)), whether the clipped term is larger).

    Source: PPO, https://arxiv.org/abs/1707.06347, eq. 7.
    """
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(*config.clip_bounds)
    return torch.maximum(unclipped, clipped), clipped > unclipped


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean over each row's target tokens (B,); 0 for rows without target tokens."""
    count = mask.sum(dim=-1)
    return masked_sum(values, mask, dim=-1) / torch.where(count > 0, count, 1)
