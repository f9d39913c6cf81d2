"""Losses against entropy collapse: they treat the tokens with the highest covariance differently.

The covariance of a token is cov = (A - mean A) (log_prob - mean log_prob), with means over the
target tokens of the mini-batch. Likely tokens with a high advantage reduce the entropy most. Means
and selection are over the whole mini-batch: trainers call the selection once, over all ranks, and
pass each micro-batch its part as `config.selected`. (VERL selects in each micro-batch, so its size
changes the update.)

Source: The Entropy Mechanism of RL for Reasoning Language Models,
https://arxiv.org/abs/2505.22617.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.algorithms.aggregation import LossAggMode
from slipstream.algorithms.losses.common import TokenTerms, clipped_objective, token_terms
from slipstream.algorithms.losses.tie_break import ranked, value_hashes
from slipstream.algorithms.registry import (
    LossMetrics,
    PolicyLossSelection,
    register_policy_loss,
)
from slipstream.algorithms.settings import PolicyLossConfig


@torch.no_grad()
def select_clip_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: PolicyLossConfig | None = None,
    *,
    hashes: Tensor | None = None,
) -> Tensor:
    """The tokens (B, T), bool, that `clip_cov` leaves out.

    Candidates are the target tokens with clip_cov_lb < cov < clip_cov_ub that PPO's clip does not
    affect. The max(int(clip_cov_ratio N), 1) candidates with the smallest `hashes` are selected,
    where N is the number of target tokens. The arguments are those of the whole mini-batch.
    `hashes` are (B, T) int64; if None, they are computed from the values.
    """
    terms = token_terms(old_log_prob, log_prob, advantages, response_mask, config)
    mask = response_mask != 0
    limits = terms.config.policy_loss
    _, clipped = clipped_objective(terms.log_ratio.exp(), terms.advantages, terms.config)
    covariance = _covariance(terms, mask)
    candidates = mask & ~clipped
    candidates &= (covariance > limits.clip_cov_lb) & (covariance < limits.clip_cov_ub)
    number = max(int(limits.clip_cov_ratio * int(mask.sum())), 1)
    if hashes is None:
        hashes = value_hashes(terms.advantages, terms.old_log_prob)
    return _smallest(number, candidates, [hashes, *_values(terms)])


@torch.no_grad()
def select_kl_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: PolicyLossConfig | None = None,
    *,
    hashes: Tensor | None = None,
) -> Tensor:
    """The tokens (B, T), bool, that `kl_cov` penalizes.

    They are the max(int(kl_cov_ratio N), 1) of N target tokens with the highest cov; `hashes` break
    ties. Arguments are as in `select_clip_cov`.
    """
    terms = token_terms(old_log_prob, log_prob, advantages, response_mask, config)
    mask = response_mask != 0
    number = max(int(terms.config.policy_loss.kl_cov_ratio * int(mask.sum())), 1)
    if hashes is None:
        hashes = value_hashes(terms.advantages, terms.old_log_prob)
    return _smallest(number, mask, [-_covariance(terms, mask), hashes, *_values(terms)])


@register_policy_loss("clip_cov", select=select_clip_cov)
def clip_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str | LossAggMode = LossAggMode.TOKEN_MEAN,
    config: PolicyLossConfig | None = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, LossMetrics]:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), and 0 for the tokens of `select_clip_cov`.

    There is no dual clip. Metrics: `actor/pg_clipfrac`, the share of tokens left out, and
    `actor/ppo_kl`.

    Source: Clip-Cov, https://arxiv.org/abs/2505.22617.

    Raises:
        ValueError: `config.selected` has another shape, or it is None and the rows are not the
            whole mini-batch.
    """
    terms = token_terms(
        old_log_prob, log_prob, advantages, response_mask, config, rollout_is_weights
    )
    selected = _selected(terms, "clip_cov", select_clip_cov)
    loss_mat, _ = clipped_objective(terms.log_ratio.exp(), terms.advantages, terms.config)
    loss_mat = torch.where(selected, 0.0, loss_mat)
    return terms.aggregate(loss_mat, loss_agg_mode), terms.metrics(selected)


@register_policy_loss("kl_cov", select=select_kl_cov)
def kl_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str | LossAggMode = LossAggMode.TOKEN_MEAN,
    config: PolicyLossConfig | None = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, LossMetrics]:
    """-A r, plus ppo_kl_coef |log_prob - old_log_prob| for the tokens of `select_kl_cov`.

    There is no clip. Metric: `actor/ppo_kl`, here the mean of |log_prob - old_log_prob|.

    Source: KL-Cov, https://arxiv.org/abs/2505.22617.

    Raises:
        ValueError: as in `clip_cov`.
    """
    terms = token_terms(
        old_log_prob, log_prob, advantages, response_mask, config, rollout_is_weights
    )
    selected = _selected(terms, "kl_cov", select_kl_cov)
    distance = terms.raw_log_ratio.abs()
    penalty = torch.where(selected, terms.config.policy_loss.ppo_kl_coef * distance, 0.0)
    loss_mat = -terms.advantages * terms.log_ratio.exp() + penalty
    return terms.aggregate(loss_mat, loss_agg_mode), {"actor/ppo_kl": terms.share(distance)}


def _selected(terms: TokenTerms, name: str, select: PolicyLossSelection) -> Tensor:
    selected = terms.config.selected
    if selected is not None:
        if selected.shape != terms.mask.shape:
            raise ValueError(
                f"config.selected has shape {tuple(selected.shape)}, but the rows of this call "
                f"{tuple(terms.mask.shape)}: split the selection like the mini-batch"
            )
        return (selected != 0) & (terms.mask != 0)
    here = float(terms.mask.sum(dtype=torch.float64))
    if here != terms.norm.num_tokens:
        raise ValueError(
            f"{name} selects tokens over the whole mini-batch, but this call has {here:g} of its "
            f"{terms.norm.num_tokens:g} target tokens and config.selected is None: select once "
            f"with policy_loss_selection({name!r}), and pass each call its rows' part"
        )
    return select(
        terms.old_log_prob, terms.log_prob, terms.advantages, terms.mask, terms.config, hashes=None
    )


def _covariance(terms: TokenTerms, mask: Tensor) -> Tensor:
    """The covariance of each token (B, T), in float64; undefined where the mask is 0."""

    def centered(values: Tensor) -> Tensor:
        values = values.double()
        # Sorted, so that the sum is bitwise independent of the order of rows and of padding.
        return values - values[mask].sort().values.mean()

    return centered(terms.advantages) * centered(terms.log_prob)


def _values(terms: TokenTerms) -> list[Tensor]:
    """Further sort keys for equal hashes, so that the result does not depend on the order of
    rows."""
    return [terms.advantages, terms.log_prob, terms.old_log_prob]


def _smallest(number: int, candidates: Tensor, keys: list[Tensor]) -> Tensor:
    """The `number` candidates with the smallest keys, as a mask."""
    positions = candidates.nonzero(as_tuple=True)
    first = ranked([key[positions] for key in keys])[:number]
    selected = torch.zeros_like(candidates)
    selected[tuple(position[first] for position in positions)] = True
    return selected
