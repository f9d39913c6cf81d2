"""Shared batches for tests of advantages, and calls like those of the loop."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from slipstream.algorithms import AdvantageConfig, AdvantageEstimator, adv_needs
from slipstream.algorithms import get_adv_estimator_fn as get
from slipstream.algorithms.advantages.whiten import WHITENING
from tests.algorithms.advantages.reference import Case, Rows

NAMES = sorted(AdvantageEstimator)
WHITENED = sorted(WHITENING)


def make_case(seed: int, groups: Sequence[int] = (3, 2, 4), length: int = 5) -> Case:
    """A batch with groups of the given sizes in mixed order. Masks have holes; the last row has no
    target token."""
    rng = random.Random(seed)
    rows = sum(groups)
    index = [f"p{g}" for g, size in enumerate(groups) for _ in range(size)]
    rng.shuffle(index)

    def table(low: float, high: float) -> Rows:
        return [[rng.uniform(low, high) for _ in range(length)] for _ in range(rows)]

    mask = [[float(rng.random() < 0.7) for _ in range(length)] for _ in range(rows)]
    mask[0], mask[-1] = [1.0] * length, [0.0] * length
    return Case(
        rewards=table(-1, 1),
        mask=mask,
        index=index,
        values=table(-1, 1),
        reward_baselines=[rng.uniform(-1, 1) for _ in range(rows)],
        old_log_probs=table(-3, -0.01),
        ref_log_probs=table(-3, -0.01),
        sum_pi_squared=table(0.1, 1),
        rollout_is_weights=table(0.5, 1.5),
        reward_parts={k: [rng.uniform(0, 2) for _ in range(rows)] for k in ("right", "short")},
        gamma=0.9,
        lam=0.8,
        part_weights=[1.0, 0.25],
    )


def plain(scores: Sequence[float], index: Sequence[str], length: int = 3) -> Case:
    """A batch of rows without mask holes, with each score on the last token and zeros elsewhere."""
    zeros = [[0.0] * length for _ in scores]
    return Case(
        rewards=[[0.0] * (length - 1) + [s] for s in scores],
        mask=[[1.0] * length for _ in scores],
        index=list(index),
        values=zeros,
        reward_baselines=[0.0 for _ in scores],
        old_log_probs=zeros,
        ref_log_probs=zeros,
        sum_pi_squared=zeros,
        rollout_is_weights=None,
        reward_parts={"right": list(scores)},
    )


def pad(case: Case, extra: int, filler: float = 7.0) -> Case:
    """The batch with `extra` masked columns of garbage, without rewards there."""

    def widen(rows: Rows, value: float) -> Rows:
        return [row + [value] * extra for row in rows]

    return replace(
        case,
        rewards=widen(case.rewards, 0.0),
        mask=widen(case.mask, 0.0),
        values=widen(case.values, filler),
        old_log_probs=widen(case.old_log_probs, filler),
        ref_log_probs=widen(case.ref_log_probs, filler),
        sum_pi_squared=widen(case.sum_pi_squared, filler),
        rollout_is_weights=case.rollout_is_weights and widen(case.rollout_is_weights, filler),
    )


def pick(case: Case, rows: Sequence[int]) -> Case:
    """The given rows, in this order."""

    def of(column: Any) -> Any:
        return None if column is None else [column[row] for row in rows]

    columns = (
        "rewards",
        "mask",
        "index",
        "values",
        "reward_baselines",
        "old_log_probs",
        "ref_log_probs",
        "sum_pi_squared",
        "rollout_is_weights",
    )
    return replace(
        case,
        reward_parts={key: of(part) for key, part in case.reward_parts.items()},
        **{name: of(getattr(case, name)) for name in columns},
    )


def config_of(case: Case) -> AdvantageConfig:
    return AdvantageConfig(
        gamma=case.gamma,
        lam=case.lam,
        norm_adv_by_std_in_grpo=case.by_std,
        gdpo_reward_keys=tuple(case.reward_parts),
        gdpo_reward_weights=case.part_weights,
    )


def estimate(
    name: str, case: Case, dtype: torch.dtype = torch.float64, **changed: Any
) -> tuple[Tensor, Tensor]:
    """Call an estimator like the loop: with keywords, and with the inputs that it declares."""
    arguments: dict[str, Any] = {
        "token_level_rewards": torch.tensor(case.rewards, dtype=dtype),
        "response_mask": torch.tensor(case.mask),
        "index": case.index,
        "config": config_of(case),
    }
    for need in adv_needs(name):
        value = getattr(case, need.value)
        if isinstance(value, dict):
            arguments[need.value] = {k: torch.tensor(v, dtype=dtype) for k, v in value.items()}
        elif value is not None:
            arguments[need.value] = torch.tensor(value, dtype=dtype)
    return get(name)(**arguments | changed)


def per_row(name: str, case: Case) -> list[float]:
    """The advantage of each row, if all tokens of a row have the same."""
    advantages, returns = estimate(name, case)
    assert torch.equal(advantages, returns)
    assert torch.equal(advantages, advantages[:, :1] * torch.tensor(case.mask))
    return [float(a) for a in advantages[:, 0]]
