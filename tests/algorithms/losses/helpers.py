"""Shared batches and settings for tests of losses."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.algorithms import (
    LossAggMode,
    PolicyLossConfig,
    PolicyLossModeConfig,
    get_policy_loss_fn,
    policy_loss_selection,
)

HORIZON = 10.0
SHARE = 0.2
"""Share of tokens that clip_cov and kl_cov select: several tokens even in small batches."""
BOUNDS = (-0.5, 5.0)
CONFIG = PolicyLossConfig(
    clip_ratio_low=0.2,
    clip_ratio_high=0.28,
    loss_scale_factor=HORIZON,
    policy_loss=PolicyLossModeConfig(
        dro_beta=0.1,
        clip_cov_ratio=SHARE,
        kl_cov_ratio=SHARE,
        clip_cov_lb=BOUNDS[0],
        clip_cov_ub=BOUNDS[1],
    ),
)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A mini-batch with columns (B, T)."""

    old: Tensor
    new: Tensor
    advantages: Tensor
    mask: Tensor
    weights: Tensor
    hashes: Tensor

    def rows(self, index: list[int]) -> Batch:
        return self.map(lambda column: column[index])

    def map(self, change: object) -> Batch:
        assert callable(change)
        return Batch(**{name: change(getattr(self, name)) for name in self.__dataclass_fields__})


def make_batch(
    seed: int, rows: int = 6, length: int = 5, dtype: torch.dtype = torch.float64
) -> Batch:
    """A batch with ratios on both sides of every clip, one row without target tokens, and garbage
    at masked positions."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> Tensor:
        values = torch.rand(rows, length, generator=generator, dtype=torch.float64)
        return (low + (high - low) * values).to(dtype)

    old = uniform(-3.0, -0.1)
    new = (old + uniform(-1.5, 1.5)).clamp(max=-0.05)
    mask = (uniform(0, 1) < 0.7).to(dtype)
    mask[0], mask[-1] = 1, 0
    garbage = torch.where(mask != 0, 0.0, torch.nan)
    return Batch(
        old=old + garbage,
        new=new + garbage,
        advantages=uniform(-2, 2) + garbage,
        mask=mask,
        weights=uniform(0.2, 2) + garbage,
        hashes=torch.randint(-(2**62), 2**62, (rows, length), generator=generator),
    )


def takes_weights(name: str) -> bool:
    return name not in ("bypass_mode", "rollout_correction")


def run(
    name: str,
    batch: Batch,
    mode: str | LossAggMode = "token-mean",
    config: PolicyLossConfig = CONFIG,
    *,
    weighted: bool = True,
) -> tuple[float, Tensor, dict[str, float]]:
    """(loss, d loss / d log_prob, metrics) of the registered loss `name` on `batch`."""
    leaf = batch.new.clone().requires_grad_()
    weights = batch.weights if weighted and takes_weights(name) else None
    loss, metrics = get_policy_loss_fn(name)(
        batch.old, leaf, batch.advantages, batch.mask, mode, config, weights
    )
    (grad,) = torch.autograd.grad(loss, leaf)
    return loss.item(), grad, {key: float(value) for key, value in metrics.items()}


def with_selection(name: str, batch: Batch, config: PolicyLossConfig = CONFIG) -> PolicyLossConfig:
    """`config` with the tokens of `batch` that the loss selects by the batch's hashes."""
    select = policy_loss_selection(name)
    if select is None:
        return config
    selected = select(
        batch.old, batch.new, batch.advantages, batch.mask, config, hashes=batch.hashes
    )
    return replace(config, selected=selected)
