"""Loss functions of one micro-batch whose results add up to those of the mini-batch.

A `LossFn` gets the log-probs of target tokens and the counts of the whole mini-batch. It returns
the micro-batch's share of loss and metrics. So the sums over micro-batches do not depend on how the
mini-batch is split. This module knows nothing about models or packing.

Shapes: all tensors are (B, T), aligned with tokens: entry t belongs to token t, column 0 is masked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from slipstream.algorithms.aggregation import (
    LossAggMode,
    Normalizers,
    counted,
    masked_sum,
    sum_loss,
)
from slipstream.algorithms.entropy import entropy_loss
from slipstream.algorithms.full_kl import KLDirection
from slipstream.algorithms.kl import kl_penalty
from slipstream.algorithms.registry import PolicyLossFn, get_policy_loss_fn
from slipstream.algorithms.settings import PolicyLossConfig
from slipstream.errors import ConfigError, DataError

FULL_KL: dict[str, KLDirection] = {"full": "reverse", "full_forward": "forward"}
"""Values of `kl_loss_type` with the KL over the full vocabulary, and its direction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The inputs of a loss function. All columns are 0 where `mask` is 0.

    `log_probs`, `entropy` and `full_kl` (the exact KL to the reference, if it is used) have
    gradients. `old_log_probs` are those of the policy at the start of the update. If a row has
    none, it is on-policy, and they are its current log-probs, detached. Other columns are None if
    the batch does not have them. `normalizers` and `num_targets`, the number of target tokens, are
    those of the whole mini-batch.
    """

    log_probs: Tensor
    entropy: Tensor
    mask: Tensor
    old_log_probs: Tensor
    normalizers: Normalizers
    num_targets: int
    advantages: Tensor | None = None
    ref_log_probs: Tensor | None = None
    rollout_log_probs: Tensor | None = None
    rollout_is_weights: Tensor | None = None
    selected: Tensor | None = None
    full_kl: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutputs:
    """The results of a loss function. `loss` is a scalar with gradients. The metrics in `sums` are
    added over micro-batches; of those in `maxima` the largest value is kept."""

    loss: Tensor
    sums: Mapping[str, Tensor | float]
    maxima: Mapping[str, Tensor | float] = field(default_factory=dict)


class LossFn(Protocol):
    """Computes a micro-batch's share of the loss. It must be additive over rows, given the
    normalizers."""

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """The share of one micro-batch."""
        ...


def sft_loss(*, prefix: str = "sft") -> LossFn:
    """Cross-entropy, averaged over all target tokens of the mini-batch.

    Metrics: `<prefix>/loss` in nats per token, `<prefix>/entropy` of the model's distribution.
    """

    def compute(inputs: LossInputs) -> LossOutputs:
        norm = inputs.normalizers
        loss = sum_loss(-inputs.log_probs, inputs.mask, LossAggMode.TOKEN_MEAN, norm)
        entropy = sum_loss(inputs.entropy.detach(), inputs.mask, LossAggMode.TOKEN_MEAN, norm)
        return LossOutputs(
            loss=loss, sums={f"{prefix}/loss": loss.detach(), f"{prefix}/entropy": entropy}
        )

    return compute


def policy_loss_fn(
    *,
    loss_mode: str = "vanilla",
    loss_agg_mode: str = LossAggMode.TOKEN_MEAN,
    config: PolicyLossConfig | None = None,
    entropy_coeff: float = 0.0,
    use_kl_loss: bool = False,
    kl_loss_coef: float = 0.001,
    kl_loss_type: str = "low_var_kl",
) -> LossFn:
    """The loss: policy loss - entropy_coeff * entropy + kl_loss_coef * KL to the reference.

    `loss_mode` names a registered policy loss, and `config` has its settings. Its
    `loss_scale_factor` is the horizon of `seq-mean-token-sum-norm`. With `kl_loss_type` `full` or
    `full_forward` the backend computes the KL over the full vocabulary. Metrics have verl's names:
    `actor/pg_loss`, `actor/entropy`, the metrics of the policy loss, and with `use_kl_loss`
    `actor/kl_loss` and `actor/kl_coef`.

    Raises:
        ConfigError: an unknown name, settings that the loss refuses, or a missing horizon.
    """
    config = config or PolicyLossConfig()
    horizon = config.loss_scale_factor
    try:
        policy_loss = get_policy_loss_fn(loss_mode)
        agg_mode = LossAggMode(loss_agg_mode)
        if kl_loss_type not in FULL_KL:
            kl_penalty(torch.zeros(1), torch.zeros(1), kl_loss_type)
        if agg_mode == LossAggMode.SEQ_MEAN_TOKEN_SUM_NORM and not horizon:
            raise ConfigError(
                f"loss_agg_mode={agg_mode} divides by a constant length, but loss_scale_factor is "
                f"{horizon}; set actor.loss_scale_factor, usually to data.max_response_length"
            )
        _probe(policy_loss, agg_mode, config)
    except ValueError as error:
        raise ConfigError(f"policy loss {loss_mode}: {error}") from error

    def compute(inputs: LossInputs) -> LossOutputs:
        if inputs.advantages is None:
            raise DataError(
                "a policy loss needs advantages, but the rows of this batch have none; set "
                "TrainRow.advantages"
            )
        norm = inputs.normalizers
        if horizon:
            norm = replace(norm, horizon=horizon)
        with counted(norm):
            pg_loss, pg_metrics = policy_loss(
                old_log_prob=inputs.old_log_probs,
                log_prob=inputs.log_probs,
                advantages=inputs.advantages,
                response_mask=inputs.mask,
                loss_agg_mode=agg_mode,
                config=replace(config, normalizers=norm, selected=inputs.selected),
                rollout_is_weights=inputs.rollout_is_weights,
            )
        if not _built_in(policy_loss):
            # Losses written for verl report means over the rows that they get.
            share = float(inputs.mask.sum()) / norm.num_tokens
            pg_metrics = {name: value * share for name, value in pg_metrics.items()}
        sums: dict[str, Tensor | float] = {"actor/pg_loss": pg_loss.detach(), **pg_metrics}
        sums["actor/entropy"] = sum_loss(inputs.entropy.detach(), inputs.mask, agg_mode, norm)
        maxima: dict[str, Tensor | float] = {}
        loss = pg_loss
        if entropy_coeff:
            loss = loss + entropy_loss(
                inputs.entropy, inputs.mask, agg_mode, norm, coeff=entropy_coeff
            )
        if use_kl_loss:
            kl_loss = sum_loss(_kl(inputs, kl_loss_type), inputs.mask, agg_mode, norm)
            loss = loss + kl_loss_coef * kl_loss
            sums["actor/kl_loss"] = kl_loss.detach()
            maxima["actor/kl_coef"] = kl_loss_coef
        return LossOutputs(loss=loss, sums=sums, maxima=maxima)

    return compute


def _built_in(policy_loss: PolicyLossFn) -> bool:
    """Whether a loss is built in. The metrics of built-in losses add up over micro-batches."""
    return policy_loss.__module__.startswith("slipstream.")


def _probe(policy_loss: PolicyLossFn, agg_mode: LossAggMode, config: PolicyLossConfig) -> None:
    """Call a built-in loss once on one token, so that it can reject its settings before the first
    rollout."""
    if not _built_in(policy_loss):
        return
    one = torch.ones(1, 1)
    policy_loss(
        old_log_prob=-one,
        log_prob=-one,
        advantages=one,
        response_mask=one,
        loss_agg_mode=agg_mode,
        config=config,
        rollout_is_weights=None,
    )


def _kl(inputs: LossInputs, kind: str) -> Tensor:
    if kind in FULL_KL:
        if inputs.full_kl is None:
            raise DataError(
                f"kl_loss_type={kind} needs the reference model in the update; call use_full_kl() "
                "of the backend, or set kl_loss_type=low_var_kl"
            )
        return inputs.full_kl
    if inputs.ref_log_probs is None:
        raise DataError(
            "use_kl_loss=true needs reference log-probs, but the rows of this batch have none; "
            "compute them with a reference policy, or set use_kl_loss=false"
        )
    return kl_penalty(inputs.log_probs, inputs.ref_log_probs, kind)


@torch.no_grad()
def rollout_difference(inputs: LossInputs) -> LossOutputs:
    """Metrics of the difference between the trainer's log-probs and the rollout's; the loss is 0.

    `training/rollout_probs_diff_max` and `_mean`: |p_rollout - p_train| of the target tokens.
    `training/rollout_log_probs_bitwise_equal`: share of target tokens with bitwise equal float32
    log-probs. `training/rollout_log_probs_differing`: number of target tokens with different ones.
    """
    recorded = inputs.rollout_log_probs
    assert recorded is not None
    targets = (inputs.mask != 0).to(inputs.mask.dtype)
    difference = (recorded.exp() - inputs.log_probs.exp()).abs() * targets
    # Count in float64, where sums of ones are exact.
    equal = masked_sum((recorded.float() == inputs.log_probs.float()).double(), targets.double())
    return LossOutputs(
        loss=difference.new_zeros(()),
        sums={
            "training/rollout_probs_diff_mean": difference.sum() / inputs.num_targets,
            "training/rollout_log_probs_bitwise_equal": equal / inputs.num_targets,
            "training/rollout_log_probs_differing": targets.double().sum() - equal,
        },
        maxima={"training/rollout_probs_diff_max": difference.max()},
    )
