"""Shared parts of the estimators: scores, group statistics, and checks of arguments."""

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
    """Scores and their group statistics, each (B,); row i has the value of its group.

    `score`, `centered` (s - mean, exactly 0 in a group of equal scores), `count` and `std` (the
    sample standard deviation with n - 1, 0 in groups of one) are float64. `slot` is the number of
    the group, in order of appearance.
    """

    score: Tensor
    centered: Tensor
    count: Tensor
    std: Tensor
    slot: Tensor

    def total(self, values: Tensor) -> Tensor:
        """The sum of `values` (B,) over each row's group (B,)."""
        return _group_sum(values, self.slot)[self.slot]


def sequence_scores(token_level_rewards: Tensor, response_mask: Tensor) -> Tensor:
    """Sums (B,) of each row's rewards in float64, including rewards at masked positions.

    The reward of an empty response is at a masked position, and still counts in its group.

    Raises:
        ValueError: the two do not have the same shape (B, T).
    """
    check_shapes(token_level_rewards=token_level_rewards, response_mask=response_mask)
    return token_level_rewards.double().sum(dim=-1)


def group_scores(scores: Tensor, index: Iterable[Hashable]) -> GroupScores:
    """Group statistics of `scores` (B,); rows with equal keys in `index` are a group.

    Raises:
        ValueError: the lengths differ, or a score is not finite.
    """
    slot_of: dict[Hashable, int] = {}
    keys = index.tolist() if isinstance(index, Tensor) else index
    slots = [slot_of.setdefault(key, len(slot_of)) for key in keys]
    if scores.ndim != 1 or len(slots) != len(scores):
        raise ValueError(
            f"there must be one group key per row: got {len(slots)} keys for scores of shape "
            f"{tuple(scores.shape)}"
        )
    score = scores.double()
    check_finite_scores(score)
    slot = torch.tensor(slots, dtype=torch.long, device=scores.device)
    count = torch.bincount(slot, minlength=len(slot_of)).double()
    # Subtract the group's lowest score first, so that equal scores give exactly 0. Otherwise the
    # mean's rounding error would remain, and the division by std + eps would amplify it.
    lowest = torch.full_like(count, torch.inf).scatter_reduce_(0, slot, score, "amin")
    above = score - lowest[slot]
    centered = above - (_group_sum(above, slot) / count)[slot]
    variance = _group_sum(centered**2, slot) / (count - 1).clamp(min=1)
    return GroupScores(
        score=score, centered=centered, count=count[slot], std=variance.sqrt()[slot], slot=slot
    )


def to_tokens(per_row: Tensor, response_mask: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """(advantages, returns), both with the values (B,) on each target token and 0 elsewhere."""
    advantages = finish(per_row.unsqueeze(-1).expand(response_mask.shape), response_mask, like)
    return advantages, advantages.clone()


def finish(values: Tensor, response_mask: Tensor, like: Tensor) -> Tensor:
    """`values` (B, T) without gradient and 0 where masked, in float64 if the rewards `like` are,
    else float32."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    return zero_masked(values.detach(), response_mask).to(dtype)


def return_to_go(token_level_rewards: Tensor, response_mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Sums (B, T) of rewards over target tokens from t on, discounted by `gamma` per token, in
    float64.

    Masked tokens are skipped: their rewards do not count, and they do not discount. Their entries
    are the sums of the tokens after them.
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
    """Check that unused keywords are those that callers pass to all estimators. Parameters that
    VERL's functions have but do not read, such as `epsilon`, are in the signatures.

    Raises:
        TypeError: there is another keyword, which would be ignored silently.
    """
    for key in more:
        if key not in _PASSED:
            raise TypeError(f"advantage estimator {name!r} has no parameter {key!r}")


def given_mask(name: str, response_mask: Tensor | None) -> Tensor:
    """The mask, which is optional in signatures with VERL's order of arguments. Raises TypeError if
    it is None."""
    if response_mask is None:
        raise TypeError(f"advantage estimator {name!r} needs a response_mask")
    return response_mask


def check_shapes(**columns: Tensor) -> None:
    """Check that all columns have the same shape (B, T).

    Raises:
        ValueError: they do not.
    """
    shapes = {name: tuple(column.shape) for name, column in columns.items()}
    if len(set(shapes.values())) > 1 or any(len(shape) != 2 for shape in shapes.values()):
        raise ValueError(f"advantages take (B, T) tensors of one shape, got {shapes}")


def check_finite(response_mask: Tensor, **columns: Tensor) -> None:
    """Check that columns (B, T) have no NaN or infinity at target tokens.

    Raises:
        ValueError: one has; the message names the column and the first bad position.
    """
    for name, column in columns.items():
        bad = (response_mask != 0) & ~column.isfinite()
        if bool(bad.any()):
            b, t = bad.nonzero()[0].tolist()
            raise ValueError(
                f"{name} of row {b} is {float(column[b, t])} at token {t}, which would break the "
                f"advantages of other rows; drop the row, or find the cause"
            )


def check_finite_scores(scores: Tensor) -> None:
    """Check that scores (B,) have no NaN or infinity.

    Raises:
        ValueError: one is not finite; the message names the first bad row.
    """
    if not bool(scores.isfinite().all()):
        row = int((~scores.isfinite()).nonzero()[0])
        raise ValueError(
            f"the score of row {row} is {float(scores[row])}, which would break the advantages of "
            f"its group; treat a reward that cannot be computed as failed"
        )


_PROVIDERS = {
    AdvantageNeed.VALUES: "a critic computes them: set critic.enable=true",
    AdvantageNeed.REWARD_BASELINES: (
        "they are the rewards of one greedy response per prompt: let the loop generate them, or "
        "set an algorithm.adv_estimator without a greedy baseline"
    ),
    AdvantageNeed.OLD_LOG_PROBS: (
        "the actor computes them before the update, or the rollout records them: pass them"
    ),
    AdvantageNeed.REF_LOG_PROBS: (
        "the reference model, here the teacher, computes them: configure actor_rollout_ref.ref"
    ),
    AdvantageNeed.SUM_PI_SQUARED: (
        "the trainer computes them before the update (compute_sum_pi_squared): pass them"
    ),
    AdvantageNeed.REWARD_PARTS: (
        "the reward function must return them with its score, under the names in "
        "algorithm.gdpo_reward_keys"
    ),
}


def required(estimator: str, need: AdvantageNeed, value: _T | None) -> _T:
    """Return `value`, the input `need` of the estimator.

    Raises:
        ValueError: it is None; the message says what provides it.
    """
    if value is None:
        raise ValueError(
            f"advantage estimator {estimator!r} needs {need.value}, got None; {_PROVIDERS[need]}"
        )
    return value


def _group_sum(values: Tensor, slot: Tensor) -> Tensor:
    groups = int(slot.max()) + 1 if len(slot) else 0
    return values.new_zeros(groups).index_add_(0, slot, values)
