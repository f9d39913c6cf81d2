"""Aggregates per-token losses to a scalar that does not depend on the split into micro-batches.

A loss is a sum over tokens, divided by counts of the whole mini-batch over all ranks
(`Normalizers`). The counts are computed once, before the mini-batch is split. `sum_loss` is then
linear in rows, so losses, gradients and metrics of micro-batches add up to those of the mini-batch.
Policy losses and training steps call this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor


class LossAggMode(StrEnum):
    """Ways to aggregate per-token losses. The names are VERL's.

    L is the loss, M the mask, i a row and n the number of non-empty rows.
    """

    TOKEN_MEAN = "token-mean"
    """sum(L M) / sum(M): all tokens have equal weight (DAPO, https://arxiv.org/abs/2503.14476)."""
    TOKEN_SUM = "token-sum"
    """sum(L M)."""
    SEQ_MEAN_TOKEN_SUM = "seq-mean-token-sum"
    """1/n sum_i sum_t L M."""
    SEQ_MEAN_TOKEN_MEAN = "seq-mean-token-mean"
    """1/n sum_i (sum_t L M / sum_t M): all responses have equal weight (GRPO,
    https://arxiv.org/abs/2402.03300)."""
    SEQ_MEAN_TOKEN_SUM_NORM = "seq-mean-token-sum-norm"
    """1/n sum_i sum_t L M / horizon, a constant length (Dr. GRPO,
    https://arxiv.org/abs/2503.20783)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalizers:
    """Counts of one whole mini-batch, over all ranks.

    `num_tokens` is the sum of the mask. `num_sequences` is the number of rows with a target token.
    `horizon` is the constant length of `seq-mean-token-sum-norm`. A framework that averages
    gradients over R ranks instead of summing them must multiply the loss by R.
    """

    num_tokens: float
    num_sequences: float
    horizon: float

    def __post_init__(self) -> None:
        for name in ("num_tokens", "num_sequences", "horizon"):
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(
                    f"{name} of a mini-batch must be > 0, got {value}: the mini-batch has no "
                    f"target token; drop such mini-batches before the update"
                )

    @classmethod
    def from_mask(cls, loss_mask: Tensor, *, horizon: float | None = None) -> Normalizers:
        """The counts of a mask (B, T) of a whole mini-batch; `horizon` defaults to T.

        Raises:
            ValueError: the mask has no target token.
        """
        tokens_per_row = loss_mask.sum(dim=-1, dtype=torch.float64)
        return cls(
            num_tokens=float(tokens_per_row.sum()),
            num_sequences=float((tokens_per_row > 0).sum()),
            horizon=float(loss_mask.shape[-1]) if horizon is None else horizon,
        )


def zero_masked(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where `mask` is not 0, else 0. NaN and infinity at masked positions affect neither
    values nor gradients."""
    return torch.where(mask != 0, values, torch.zeros_like(values))


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of `values * mask`. Values at masked positions are ignored."""
    weighted = zero_masked(values, mask) * mask
    return weighted.sum() if dim is None else weighted.sum(dim=dim)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of `values`, weighted by `mask`.

    Raises:
        ValueError: the mask is empty.
    """
    count = mask.sum()
    if not bool(count > 0):
        raise ValueError("masked_mean over an empty mask is undefined; skip such batches")
    return masked_sum(values, mask) / count


def sum_loss(loss_mat: Tensor, mask: Tensor, mode: str | LossAggMode, norm: Normalizers) -> Tensor:
    """This micro-batch's share of the mini-batch's loss.

    `loss_mat` and `mask` (B, T) are the rows of a micro-batch, padded to any T. Rows without target
    tokens contribute 0.

    Raises:
        ValueError: the mode is unknown; the message lists the modes.
    """
    match _mode(mode):
        case LossAggMode.TOKEN_MEAN:
            return masked_sum(loss_mat, mask) / norm.num_tokens
        case LossAggMode.TOKEN_SUM:
            return masked_sum(loss_mat, mask)
        case LossAggMode.SEQ_MEAN_TOKEN_SUM:
            return masked_sum(loss_mat, mask) / norm.num_sequences
        case LossAggMode.SEQ_MEAN_TOKEN_SUM_NORM:
            return masked_sum(loss_mat, mask) / (norm.num_sequences * norm.horizon)
        case LossAggMode.SEQ_MEAN_TOKEN_MEAN:
            tokens_per_row = mask.sum(dim=-1)
            # An empty row's numerator is 0, so any positive denominator gives 0.
            divisor = torch.where(tokens_per_row > 0, tokens_per_row, 1)
            return (masked_sum(loss_mat, mask, dim=-1) / divisor).sum() / norm.num_sequences


_COUNTS: ContextVar[Normalizers | None] = ContextVar("_COUNTS", default=None)


@contextmanager
def counted(norm: Normalizers) -> Iterator[None]:
    """A context manager that provides `agg_loss` with the counts that it does not get as arguments.

    So losses written for VERL up to 0.6, which pass no counts, do not depend on micro-batches. The
    counts are those of all target tokens, even if a loss aggregates only a part of them.
    """
    token = _COUNTS.set(norm)
    try:
        yield
    finally:
        _COUNTS.reset(token)


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str | LossAggMode,
    dp_size: int = 1,
    batch_num_tokens: float | Tensor | None = None,
    global_batch_size: float | Tensor | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """`sum_loss` with VERL's arguments: aggregates a loss (B, T) with a mask (B, T) to a scalar.

    `batch_num_tokens` is the number of target tokens of the whole mini-batch, `global_batch_size`
    its number of non-empty rows, `loss_scale_factor` the horizon. A mode reads only the counts in
    its definition (`LossAggMode`), and the others may be None. If a policy loss that a trainer
    calls leaves a count out, the mini-batch's count is used (`counted`); elsewhere it is computed
    from `loss_mask`. The result is multiplied by `dp_size`, for frameworks that average gradients
    over that number of ranks.

    Raises:
        ValueError: the mode is unknown, a count is not positive, or a count that the mode needs is
            missing with several ranks.
    """
    if not dp_size >= 1:
        raise ValueError(f"dp_size must be at least 1, got {dp_size}")
    mode, counts = _mode(loss_agg_mode), _COUNTS.get()

    def count(name: str, given: float | Tensor | None, of_trainer: str) -> float:
        if given is not None:
            return float(given)
        if counts is not None:
            return float(getattr(counts, of_trainer))
        if dp_size > 1:
            raise ValueError(
                f"with dp_size={dp_size} the rows of one rank are not the mini-batch: pass the "
                f"mini-batch's {name} for loss_agg_mode={mode.value}"
            )
        return float(getattr(Normalizers.from_mask(loss_mask), of_trainer))

    # A count that the mode does not read may be missing; 1 is never used.
    tokens = rows = horizon = 1.0
    if mode is LossAggMode.TOKEN_MEAN:
        tokens = count("batch_num_tokens", batch_num_tokens, "num_tokens")
    elif mode is not LossAggMode.TOKEN_SUM:
        rows = count("global_batch_size", global_batch_size, "num_sequences")
    if mode is LossAggMode.SEQ_MEAN_TOKEN_SUM_NORM:
        own_horizon = float(loss_mask.shape[-1]) if counts is None else counts.horizon
        horizon = own_horizon if loss_scale_factor is None else loss_scale_factor
    norm = Normalizers(num_tokens=tokens, num_sequences=rows, horizon=horizon)
    loss = sum_loss(loss_mat, loss_mask, mode, norm)
    return loss if dp_size == 1 else loss * dp_size


def _mode(name: str | LossAggMode) -> LossAggMode:
    try:
        return LossAggMode(name)
    except ValueError:
        known = ", ".join(LossAggMode)
        raise ValueError(f"unknown loss_agg_mode {str(name)!r}; known: {known}") from None
