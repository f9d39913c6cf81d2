"""Rollout correction of one batch: weights, mask and metrics from two sets of log-probs.

Called once per batch by the loop (decoupled mode: before the update, for the policy that starts
it), and with the present log-probs by the loss of `bypass_mode`. Pure; all results are detached.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.algorithms.aggregation import zero_masked
from slipstream.algorithms.correction.metrics import (
    as_floats,
    off_policy_metrics,
    rejection_metrics,
    veto_metrics,
    weight_metrics,
)
from slipstream.algorithms.correction.rejection import rejection_mask
from slipstream.algorithms.correction.settings import RolloutCorrectionConfig
from slipstream.algorithms.correction.veto import vetoed
from slipstream.algorithms.correction.weights import importance_weights, log_ratios


@torch.no_grad()
def rollout_correction(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor | None,
    response_mask: Tensor,
    config: RolloutCorrectionConfig,
) -> tuple[Tensor | None, Tensor, dict[str, float]]:
    """(weights or None, new mask, metrics) of the whole batch given.

    All tensors (B, T). `old_log_prob` is the trainer's, `rollout_log_prob` the rollout engine's for
    the same tokens; where `response_mask` is 0 both may hold anything. Weights multiply the
    per-token loss, in float32 or float64, and are 0 where the new mask is; rejection does not
    change others, nor batch normalization, which sees the tokens of `response_mask`. The new mask
    is `response_mask` with rejected tokens at 0; it may be empty. Metrics: see `metrics`.

    Statistics are over this batch: to correct independently of micro-batching, give it whole.

    Raises:
        ValueError: no rollout log-probs, shapes that differ, or an empty mask.
    """
    if rollout_log_prob is None:
        raise ValueError(
            "rollout correction needs the rollout's log-probs, but this batch has none; take an "
            "engine that records them, as all of actor_rollout_ref.rollout.name do, or leave "
            "algorithm.rollout_correction out"
        )
    if not old_log_prob.shape == rollout_log_prob.shape == response_mask.shape:
        raise ValueError(
            f"rollout correction needs log-probs and mask of one shape (B, T), got "
            f"{tuple(old_log_prob.shape)}, {tuple(rollout_log_prob.shape)} and "
            f"{tuple(response_mask.shape)}"
        )
    if not bool((response_mask != 0).any()):
        raise ValueError(
            "rollout correction over an empty response mask has no statistics; skip such batches"
        )
    log_ratio = log_ratios(old_log_prob, rollout_log_prob, response_mask)
    targets = (response_mask != 0).to(log_ratio.dtype)
    metrics = off_policy_metrics(old_log_prob, rollout_log_prob, log_ratio, targets)

    keep = torch.ones_like(targets, dtype=torch.bool)
    rules = [(rule, rejection_mask(log_ratio, targets, rule)) for rule in config.rejections]
    for _, rejected in rules:
        keep &= rejected.keep
    if rules:
        metrics |= rejection_metrics(rules, keep, targets)
    if config.rollout_token_veto_threshold is not None:
        veto = vetoed(log_ratio, targets, config.rollout_token_veto_threshold)
        metrics |= veto_metrics(veto, targets)
        keep &= ~veto.any(dim=-1, keepdim=True)
    new_mask = zero_masked(response_mask, keep)

    weights = None
    if config.rollout_is is not None:
        made = importance_weights(log_ratio, targets, config)
        metrics |= weight_metrics(made, targets, config.weight_bounds)
        # Not merely unused there: a NaN times a loss gradient of 0 would be a NaN.
        weights = zero_masked(made.final, new_mask)
    return weights, new_mask, as_floats(metrics)
