"""The critic's value loss."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.algorithms.aggregation import (
    LossAggMode,
    Normalizers,
    agg_loss,
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
    unclipped, clipped = _errors(vpreds, returns, values, response_mask, cliprange_value)
    norm = normalizers or Normalizers.from_mask(response_mask, horizon=loss_scale_factor)
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
    dp_size: int = 1,
    batch_num_tokens: float | Tensor | None = None,
    global_batch_size: float | Tensor | None = None,
    loss_scale_factor: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`value_loss` with VERL's signature; returns (loss, vf_clipfrac).

    The counts and `dp_size` have the meaning that they have in `agg_loss`. `vf_clipfrac` is the
    share among the target tokens of these rows, 0 if they have none.

    Raises:
        ValueError: as in `value_loss` and `agg_loss`.
    """
    unclipped, clipped = _errors(vpreds, returns, values, response_mask, cliprange_value)
    loss = 0.5 * agg_loss(
        torch.maximum(unclipped, clipped),
        response_mask,
        loss_agg_mode,
        dp_size,
        batch_num_tokens,
        global_batch_size,
        loss_scale_factor,
    )
    tokens = response_mask.sum().clamp(min=1)
    larger = (clipped > unclipped).detach().to(vpreds.dtype)
    return loss, masked_sum(larger, response_mask) / tokens


def _errors(
    vpreds: Tensor, returns: Tensor, values: Tensor, response_mask: Tensor, cliprange_value: float
) -> tuple[Tensor, Tensor]:
    """The squared errors of the values, and of the clipped values (B, T); 0 where masked."""
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
    vpreds, returns, values = (zero_masked(t, response_mask) for t in (vpreds, returns, values))
    within = vpreds.clamp(values - cliprange_value, values + cliprange_value)
    return (vpreds - returns).square(), (within - returns).square()
