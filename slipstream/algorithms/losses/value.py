"""The critic's value loss."""

from __future__ import annotations

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


def value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    *,
    cliprange_value: float = 0.5,
    loss_agg_mode: str | LossAggMode = LossAggMode.TOKEN_MEAN,
    normalizers: Normalizers | None = None,
    loss_scale_factor: float | None = None,
) -> tuple[Tensor, LossMetrics]:
    """1/2 max((V - R)^2, (clip(V, V_old - cliprange_value, V_old + cliprange_value) - R)^2).

    V are `vpreds`, which have the gradient; V_old are `values`, those at the start of the update; R
    are `returns`. All are (B, T). `normalizers` are the counts of the whole mini-batch; None means
    that these rows are the whole mini-batch, with the horizon `loss_scale_factor`. Loss and metrics
    add up over micro-batches. Metrics: `critic/vf_clipfrac`, the share of tokens whose clipped
    error is larger, and `critic/vpred_mean`.

    Source: as in the code of PPO, https://arxiv.org/abs/1707.06347; described in
    https://arxiv.org/abs/2005.12729.

    Raises:
        ValueError: shapes differ, `cliprange_value` is not positive, or there is no target token.
    """
    if not cliprange_value > 0:
        raise ValueError(
            f"cliprange_value must be > 0, got {cliprange_value}, or values could not change; the "
            f"usual value is 0.5"
        )
    shapes = [tuple(t.shape) for t in (vpreds, returns, values, response_mask)]
    if len(set(shapes)) > 1 or vpreds.ndim != 2:
        raise ValueError(
            f"vpreds, returns, values and response_mask must be (B, T) tensors of one shape, got "
            f"{shapes}"
        )
    norm = normalizers or Normalizers.from_mask(response_mask, horizon=loss_scale_factor)
    vpreds, returns, values = (zero_masked(t, response_mask) for t in (vpreds, returns, values))
    within = vpreds.clamp(values - cliprange_value, values + cliprange_value)
    unclipped, clipped = (vpreds - returns).square(), (within - returns).square()
    loss = 0.5 * sum_loss(torch.maximum(unclipped, clipped), response_mask, loss_agg_mode, norm)

    def share(what: Tensor) -> Tensor:
        return masked_sum(what.detach().to(vpreds.dtype), response_mask) / norm.num_tokens

    return loss, {
        "critic/vf_clipfrac": share(clipped > unclipped),
        "critic/vpred_mean": share(vpreds),
    }


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str | LossAggMode = LossAggMode.TOKEN_MEAN,
) -> tuple[Tensor, Tensor | float]:
    """`value_loss` with VERL's signature; returns (loss, vf_clipfrac). The rows must be the whole
    mini-batch.

    Raises:
        ValueError: as in `value_loss`.
    """
    loss, metrics = value_loss(
        vpreds,
        returns,
        values,
        response_mask,
        cliprange_value=cliprange_value,
        loss_agg_mode=loss_agg_mode,
    )
    return loss, metrics["critic/vf_clipfrac"]
