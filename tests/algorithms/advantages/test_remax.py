"""ReMax against values computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.algorithms.advantages.helpers import estimate, plain

CASE = replace(
    plain([0.0, 0.0], "aa"),
    rewards=[[0.25, 9.0, 1.0], [0.0, 0.0, 2.0]],
    mask=[[1, 0, 1], [1, 1, 1]],
    reward_baselines=[0.5, 3.0],
)


def test_remax_values() -> None:
    # The reward on the masked token does not count.
    advantages, returns = estimate("remax", CASE)
    assert returns.tolist() == [[1.25, 0.0, 1.0], [2.0, 2.0, 2.0]]
    assert advantages.tolist() == [[0.75, 0.0, 0.5], [-1.0, -1.0, -1.0]]


def test_rejects_invalid_baselines() -> None:
    with pytest.raises(ValueError, match=r"one score per row: got shape \(3,\) for 2 rows"):
        estimate("remax", CASE, reward_baselines=torch.zeros(3))
    with pytest.raises(ValueError, match="score of row 1 is nan"):
        estimate("remax", CASE, reward_baselines=torch.tensor([0.0, float("nan")]))
