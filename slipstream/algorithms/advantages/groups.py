"""What estimators share: statistics of groups, and advantages of responses written to tokens.

A group is the responses to one prompt: rows of equal `index`, in any order. Called by the
estimators of this package only. Knows nothing about any of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.algorithms.aggregation import zero_masked

GRPO_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class GroupScores:
    """Scores with their group statistics, each (B,) and float64: row i holds its group's value.

    `centered` is s - mean; exactly 0 in a group of equal scores. `std` is the sample standard
    deviation (n - 1), 0 in groups of one.
    """

    score: Tensor
    centered: Tensor
    count: Tensor
    std: Tensor


def group_scores(scores: Tensor, index: Iterable[Hashable]) -> GroupScores:
    """Group statistics of (B,) `scores` by the B keys `index`.

    Raises:
        ValueError: the lengths differ, or a score is not finite.
    """
    slot, groups = group_slots(index, scores)
    # Sums of float32 numbers are exact in float64 at these sizes: equal scores centre to exactly 0,
    # where a rounded mean would leave a remainder that the division by std + eps blows up.
    score = scores.double()
    check_finite(score)
    count = torch.bincount(slot, minlength=groups).double()

    def total(values: Tensor) -> Tensor:
        return torch.zeros_like(count).index_add_(0, slot, values)

    centered = score - (total(score) / count)[slot]
    variance = total(centered**2) / (count - 1).clamp(min=1)
    return GroupScores(score=score, centered=centered, count=count[slot], std=variance.sqrt()[slot])


def group_slots(index: Iterable[Hashable], scores: Tensor) -> tuple[Tensor, int]:
    """(B,) numbers of the groups in order of appearance, and how many there are.

    Raises:
        ValueError: another number of keys than of rows.
    """
    slot_of: dict[Hashable, int] = {}
    slots = [slot_of.setdefault(_key(key), len(slot_of)) for key in index]
    if scores.ndim != 1 or len(slots) != len(scores):
        raise ValueError(
            f"one group key per row is needed: got {len(slots)} keys for scores of shape "
            f"{tuple(scores.shape)}"
        )
    return torch.tensor(slots, dtype=torch.long, device=scores.device), len(slot_of)


def _key(key: Hashable) -> Hashable:
    """Keys in a tensor compare by identity."""
    return key.item() if isinstance(key, Tensor) else key


def check_finite(scores: Tensor) -> None:
    """Raises ValueError naming the first row whose score is not finite."""
    if not bool(scores.isfinite().all()):
        row = int((~scores.isfinite()).nonzero()[0, 0])
        raise ValueError(
            f"the score of row {row} is {float(scores[row])}: it would spoil its whole group; "
            f"treat a reward that cannot be computed as failed"
        )


def scores_of(token_level_rewards: Tensor) -> Tensor:
    """(B,) float64 scores: sums over all tokens, masked ones included, where the reward of an empty
    response stands."""
    return token_level_rewards.double().sum(dim=-1)


def masked_rewards(token_level_rewards: Tensor, response_mask: Tensor) -> Tensor:
    """(B, T) float64 rewards of target tokens, 0 elsewhere.

    Raises:
        ValueError: a reward is not finite, or the shapes differ.
    """
    if token_level_rewards.shape != response_mask.shape or response_mask.ndim != 2:
        raise ValueError(
            f"rewards and mask must be (B, T) of one shape, got {tuple(token_level_rewards.shape)} "
            f"and {tuple(response_mask.shape)}"
        )
    rewards = zero_masked(token_level_rewards.double(), response_mask)
    check_finite(rewards.sum(dim=-1))
    return rewards


def returns_to_go(rewards: Tensor) -> Tensor:
    """(B, T): the sum of a token's reward and all later ones."""
    return rewards.flip(-1).cumsum(dim=-1).flip(-1)


def to_tokens(per_row: Tensor, response_mask: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """(advantages, returns): each row's number on all of its target tokens."""
    return as_given(per_row.double().unsqueeze(-1) * (response_mask != 0), like)


def as_given(
    advantages: Tensor, like: Tensor, returns: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """In the dtype of the rewards `like`, float32 at least; without `returns` they are equal."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    given = advantages.to(dtype)
    return given, given.clone() if returns is None else returns.to(dtype)
