"""Metrics of rollout correction, under VERL's names (`rollout_corr/...`).

Statistics are over the given batch, and include only target tokens and non-empty sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from slipstream.algorithms.correction.rejection import Rejected
from slipstream.algorithms.correction.settings import Rejection, WeightBounds
from slipstream.algorithms.correction.weights import (
    LOG_RATIO_BOUND,
    ImportanceWeights,
    per_sequence_mean,
)

PREFIX = "rollout_corr/"


@torch.no_grad()
def off_policy_metrics(
    old_log_prob: Tensor, rollout_log_prob: Tensor, log_ratio: Tensor, targets: Tensor
) -> dict[str, Tensor]:
    """The difference between the trainer's policy and the rollout's, with rho = `log_ratio`.

    Over tokens: `kl` mean(-rho), `k3_kl` mean(e^rho - 1 - rho), `chi2_token` mean(e^2rho) - 1. Over
    sequences, with log-perplexity -mean(log-prob): `training_log_ppl`, `rollout_log_ppl`,
    `training_ppl` and `rollout_ppl` (means of its exp), `log_ppl_diff` (training minus rollout),
    its `_abs_diff`, `_max` and `_min`, `ppl_ratio` mean(e^difference), `chi2_seq` mean(e^(2 sum
    rho)) - 1. Before exp, rho and its sum are clamped to +-20. All tensors are (B, T).
    """
    rho = log_ratio[targets != 0]
    bounded = rho.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    training = -per_sequence_mean(old_log_prob.to(log_ratio.dtype), targets)
    rollout = -per_sequence_mean(rollout_log_prob.to(log_ratio.dtype), targets)
    difference = training - rollout
    sums = log_ratio.sum(dim=-1)[targets.sum(dim=-1) > 0]
    sums = sums.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return {
        "training_ppl": training.exp().mean(),
        "rollout_ppl": rollout.exp().mean(),
        "training_log_ppl": training.mean(),
        "rollout_log_ppl": rollout.mean(),
        "kl": -rho.mean(),
        "k3_kl": (bounded.expm1() - bounded).mean(),
        "log_ppl_diff": difference.mean(),
        "log_ppl_abs_diff": difference.abs().mean(),
        "log_ppl_diff_max": difference.max(),
        "log_ppl_diff_min": difference.min(),
        "ppl_ratio": difference.exp().mean(),
        "chi2_token": (2 * bounded).exp().mean() - 1,
        "chi2_seq": (2 * sums).exp().mean() - 1,
    }


@torch.no_grad()
def weight_metrics(
    weights: ImportanceWeights, targets: Tensor, bounds: WeightBounds
) -> dict[str, Tensor]:
    """Statistics of the weights over target tokens (`rollout_is_...`), and of their means over
    sequences (`rollout_is_seq_...`).

    `mean`, `min`, `max`, `fraction_high` and `fraction_low` are before truncation; the last two are
    the shares above the upper bound and below the lower one (else the reciprocal of the upper one).
    `std` and `eff_sample_size`, mean(w)^2 / mean(w^2), are of the weights after truncation. `std`
    over tokens is that of the population; over sequences it is that of a sample, and 0 for a single
    sequence.
    """
    low = 1 / bounds.high if bounds.low is None else bounds.low
    raw, used = weights.raw[targets != 0], weights.used[targets != 0]
    mean_square = used.square().mean()
    sequences = per_sequence_mean(weights.raw, targets)
    return {
        "rollout_is_mean": raw.mean(),
        "rollout_is_std": used.std(correction=0),
        "rollout_is_min": raw.min(),
        "rollout_is_max": raw.max(),
        "rollout_is_eff_sample_size": used.mean().square()
        / torch.where(mean_square > 0, mean_square, 1.0),
        "rollout_is_ratio_fraction_high": _share(raw > bounds.high),
        "rollout_is_ratio_fraction_low": _share(raw < low),
        "rollout_is_seq_mean": sequences.mean(),
        "rollout_is_seq_std": sequences.std(correction=int(len(sequences) > 1)),
        "rollout_is_seq_min": sequences.min(),
        "rollout_is_seq_max": sequences.max(),
        "rollout_is_seq_max_deviation": (sequences - 1).abs().max(),
        "rollout_is_seq_fraction_high": _share(sequences > bounds.high),
        "rollout_is_seq_fraction_low": _share(sequences < low),
    }


@torch.no_grad()
def rejection_metrics(
    rules: Sequence[tuple[Rejection, Rejected]], keep: Tensor, targets: Tensor
) -> dict[str, Tensor]:
    """`rollout_rs_masked_fraction`, the share of rejected target tokens, and
    `rollout_rs_seq_masked_fraction`, the share of sequences with a rejected token. The same for
    each rule as `rollout_rs_<rule>_...`, with `mean`, `min` and `max` of the rule's statistic,
    which help to choose a threshold."""
    metrics = _fractions("rollout_rs_", keep, targets)
    for rule, rejected in rules:
        prefix = f"rollout_rs_{rule.name}_"
        metrics |= _fractions(prefix, rejected.keep, targets)
        statistic = rejected.statistic.expand_as(targets)[targets != 0]
        metrics[f"{prefix}mean"] = statistic.mean()
        metrics[f"{prefix}min"] = statistic.min()
        metrics[f"{prefix}max"] = statistic.max()
    return metrics


@torch.no_grad()
def veto_metrics(vetoed: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """`rollout_is_veto_fraction`, the share of removed sequences, and
    `rollout_is_catastrophic_token_fraction`, the share of tokens that caused it."""
    fractions = _fractions("", ~vetoed, targets)
    return {
        "rollout_is_veto_fraction": fractions["seq_masked_fraction"],
        "rollout_is_catastrophic_token_fraction": fractions["masked_fraction"],
    }


def as_floats(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """The metrics with their prefix, as numbers. They are copied from the device together."""
    if not metrics:
        return {}
    values: list[float] = torch.stack([value.double() for value in metrics.values()]).tolist()
    return {PREFIX + name: value for name, value in zip(metrics, values, strict=True)}


def _share(flags: Tensor) -> Tensor:
    return flags.double().mean()


def _fractions(prefix: str, keep: Tensor, targets: Tensor) -> dict[str, Tensor]:
    rejected = ~keep & (targets != 0)
    rows = (targets != 0).any(dim=-1)
    return {
        f"{prefix}masked_fraction": _share(rejected[targets != 0]),
        f"{prefix}seq_masked_fraction": _share(rejected.any(dim=-1)[rows]),
    }
