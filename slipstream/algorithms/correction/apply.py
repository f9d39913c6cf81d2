"""Rollout correction of one batch: weights, mask and metrics from two sets of log-probs.

In decoupled mode the loop calls it once per batch, before the update, with the policy's log-probs
at the start of the update. With `bypass_mode` it is called with the current log-probs. Results are
detached.
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
    """Returns (weights or None, new mask, metrics) of a batch.

    All tensors are (B, T). `old_log_prob` are the trainer's log-probs, `rollout_log_prob` the
    engine's for the same tokens; both are ignored where `response_mask` is 0. Weights multiply the
    per-token loss. They are float32 or float64, and 0 where the new mask is 0. Rejection does not
    change other weights, and batch normalization includes rejected tokens. The new mask is
    `response_mask` with rejected tokens set to 0; it may be empty. The module `metrics` explains
    the metrics.

    Statistics are over the given batch, so pass the whole batch to be independent of micro-batches.

    Raises:
        ValueError: there are no rollout log-probs, shapes differ, or the mask is empty.
    """
    if rollout_log_prob is None:
        raise ValueError(
            "rollout correction needs the rollout's log-probs, but this batch has none; use an "
            "engine that records them, as all values of actor_rollout_ref.rollout.name do, or "
            "remove algorithm.rollout_correction"
        )
    if not old_log_prob.shape == rollout_log_prob.shape == response_mask.shape:
        raise ValueError(
            f"rollout correction needs log-probs and mask of one shape (B, T), got "
            f"{tuple(old_log_prob.shape)}, {tuple(rollout_log_prob.shape)} and "
            f"{tuple(response_mask.shape)}"
        )
    if not bool((response_mask != 0).any()):
        raise ValueError(
            "rollout correction over an empty response mask is undefined; skip such batches"
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
        # Zeroed where masked, because a NaN times a loss gradient of 0 would be NaN.
        weights = zero_masked(made.final, new_mask)
    return weights, new_mask, as_floats(metrics)
