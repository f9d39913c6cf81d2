"""Scores of responses, statistics of their groups, and the checks that every estimator makes.

Called by the estimators of this package. Knows nothing about any of their formulas.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from slipstream.algorithms.aggregation import zero_masked
from slipstream.algorithms.registry import AdvantageNeed

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class GroupScores:
    """Scores with their group statistics, each (B,): row i holds its group's value.

    `score`, `centered` (s - mean; exactly 0 in a group of equal scores), `count` and `std` (the
    sample standard deviation, n - 1; 0 in groups of one) are float64. `slot` numbers the groups in
    order of appearance.
    """

    score: Tensor
    centered: Tensor
    count: Tensor
    std: Tensor
    slot: Tensor

    def total(self, values: Tensor) -> Tensor:
        """(B,): for each row the sum of the (B,) `values` over its group."""
        return _group_sum(values, self.slot)[self.slot]


def sequence_scores(token_level_rewards: Tensor, response_mask: Tensor) -> Tensor:
    """(B,) float64 sums of each row's rewards, those at masked places included.

    The reward of an empty response stands on a masked place, and still counts in its group.

    Raises:
        ValueError: the two are not of one shape (B, T).
    """
    check_shapes(token_level_rewards=token_level_rewards, response_mask=response_mask)
    return token_level_rewards.double().sum(dim=-1)


def group_scores(scores: Tensor, index: Iterable[Hashable]) -> GroupScores:
    """Group statistics of (B,) `scores` by the B keys `index`.

    Raises:
        ValueError: the lengths differ, or a score is not finite.
    """
    slot_of: dict[Hashable, int] = {}
    keys = index.tolist() if isinstance(index, Tensor) else index
    slots = [slot_of.setdefault(key, len(slot_of)) for key in keys]
    if scores.ndim != 1 or len(slots) != len(scores):
        raise ValueError(
            f"one group key per row is needed: got {len(slots)} keys for scores of shape "
            f"{tuple(scores.shape)}"
        )
    score = scores.double()
    check_finite_scores(score)
    slot = torch.tensor(slots, dtype=torch.long, device=scores.device)
    count = torch.bincount(slot, minlength=len(slot_of)).double()
    # Relative to the group's lowest score, equal scores centre to exactly 0, where a rounded mean
    # would leave a remainder that the division by std + eps blows up.
    lowest = torch.full_like(count, torch.inf).scatter_reduce_(0, slot, score, "amin")
    above = score - lowest[slot]
    centered = above - (_group_sum(above, slot) / count)[slot]
    variance = _group_sum(centered**2, slot) / (count - 1).clamp(min=1)
    return GroupScores(
        score=score, centered=centered, count=count[slot], std=variance.sqrt()[slot], slot=slot
    )


def to_tokens(per_row: Tensor, response_mask: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """(advantages, returns), equal: the (B,) values on each target token, 0 elsewhere."""
    advantages = finish(per_row.unsqueeze(-1).expand(response_mask.shape), response_mask, like)
    return advantages, advantages.clone()


def finish(values: Tensor, response_mask: Tensor, like: Tensor) -> Tensor:
    """(B, T) `values` without gradient, 0 where masked: float64 if the rewards `like` are, else
    float32."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    return zero_masked(values.detach(), response_mask).to(dtype)


def return_to_go(token_level_rewards: Tensor, response_mask: Tensor, gamma: float = 1.0) -> Tensor:
    """(B, T) float64 sums over the target tokens from t on, discounted by `gamma` per token.

    Masked tokens are skipped: their rewards do not count, nor do they discount; they hold what
    follows them.
    """
    rewards = zero_masked(token_level_rewards.double(), response_mask)
    if gamma == 1.0:
        return rewards.flip(-1).cumsum(dim=-1).flip(-1)
    target = response_mask != 0
    running = rewards.new_zeros(len(rewards))
    columns = []
    for t in reversed(range(rewards.shape[1])):
        running = torch.where(target[:, t], rewards[:, t] + gamma * running, running)
        columns.append(running)
    return torch.stack(columns[::-1], dim=-1) if columns else rewards


_PASSED = frozenset(AdvantageNeed) | {"index", "config", "non_tensor_batch", "batch"}


def check_keywords(name: str, more: Mapping[str, object]) -> None:
    """That the keywords which an estimator has no use for are such as callers give to all alike.
    Parameters that VERL's has and does not read, such as `epsilon`, are in the signatures.

    Raises:
        TypeError: another one, which would be lost without a word.
    """
    for key in more:
        if key not in _PASSED:
            raise TypeError(f"advantage estimator {name!r} has no parameter {key!r}")


def given_mask(name: str, response_mask: Tensor | None) -> Tensor:
    """The mask, where VERL's order has it after what may be missing. Raises TypeError for None."""
    if response_mask is None:
        raise TypeError(f"advantage estimator {name!r} needs a response_mask")
    return response_mask


def check_shapes(**columns: Tensor) -> None:
    """All (B, T) and alike.

    Raises:
        ValueError: otherwise.
    """
    shapes = {name: tuple(column.shape) for name, column in columns.items()}
    if len(set(shapes.values())) > 1 or any(len(shape) != 2 for shape in shapes.values()):
        raise ValueError(f"advantages take (B, T) tensors of one shape, got {shapes}")


def check_finite(response_mask: Tensor, **columns: Tensor) -> None:
    """No NaN or infinity at the target tokens of (B, T) columns.

    Raises:
        ValueError: otherwise; names the column and its first bad place.
    """
    for name, column in columns.items():
        bad = (response_mask != 0) & ~column.isfinite()
        if bool(bad.any()):
            b, t = bad.nonzero()[0].tolist()
            raise ValueError(
                f"{name} of row {b} is {float(column[b, t])} at token {t}: one such value would "
                f"spoil advantages of the whole batch; drop the row, or find where it comes from"
            )


def check_finite_scores(scores: Tensor) -> None:
    """No NaN or infinity among (B,) scores.

    Raises:
        ValueError: otherwise; names the first bad row.
    """
    if not bool(scores.isfinite().all()):
        row = int((~scores.isfinite()).nonzero()[0])
        raise ValueError(
            f"the score of row {row} is {float(scores[row])}: it would spoil its whole group; "
            f"treat a reward that cannot be computed as failed"
        )


_PROVIDERS = {
    AdvantageNeed.VALUES: "a critic computes them: set critic.enable=true",
    AdvantageNeed.REWARD_BASELINES: (
        "they are the rewards of one greedy response per prompt: have the loop generate them, or "
        "choose an algorithm.adv_estimator without a greedy baseline"
    ),
    AdvantageNeed.OLD_LOG_PROBS: (
        "the actor computes them before the update, or the rollout records them: pass them on"
    ),
    AdvantageNeed.REF_LOG_PROBS: (
        "the reference model, here the teacher, computes them: configure actor_rollout_ref.ref"
    ),
    AdvantageNeed.SUM_PI_SQUARED: (
        "the trainer computes them before the update (compute_sum_pi_squared): pass them on"
    ),
    AdvantageNeed.REWARD_PARTS: (
        "the reward function returns them beside its score, under the names in "
        "algorithm.gdpo_reward_keys"
    ),
}


def required(estimator: str, need: AdvantageNeed, value: _T | None) -> _T:
    """`value`, which the caller gave under the name `need`.

    Raises:
        ValueError: it is None.
    """
    if value is None:
        raise ValueError(
            f"advantage estimator {estimator!r} needs {need.value}, got None; {_PROVIDERS[need]}"
        )
    return value


def _group_sum(values: Tensor, slot: Tensor) -> Tensor:
    groups = int(slot.max()) + 1 if len(slot) else 0
    return values.new_zeros(groups).index_add_(0, slot, values)
