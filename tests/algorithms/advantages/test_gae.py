"""GAE against values computed by hand and against its definition as a sum."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from slipstream.algorithms import (
    compute_gae_advantage_return,
    estimate_advantages,
    masked_whiten,
)
from tests.algorithms.advantages.helpers import estimate, make_case, plain

CASE = replace(
    plain([1.0, 0.0], "aa", length=2),
    values=[[0.5, 0.25], [1.0, 0.5]],
    gamma=0.5,
    lam=0.5,
)


def test_gae_values() -> None:
    # Deltas -0.375, 0.75 and -0.75, -0.5; gamma lam = 0.25.
    advantages, returns = estimate("gae", CASE)
    raw = torch.tensor([[-0.1875, 0.75], [-0.875, -0.5]], dtype=torch.float64)
    assert returns.tolist() == [[0.3125, 1.0], [0.125, 0.0]]
    torch.testing.assert_close(advantages, masked_whiten(raw, torch.ones(2, 2)))


def test_observation_tokens_are_skipped() -> None:
    wide = replace(
        CASE,
        rewards=[[0.0, 5.0, 1.0], [0.0, 0.0, 0.0]],
        values=[[0.5, 9.0, 0.25], [1.0, 0.5, 9.0]],
        mask=[[1, 0, 1], [1, 1, 0]],
    )
    for got, narrow in zip(estimate("gae", wide), estimate("gae", CASE), strict=True):
        assert got.tolist() == [[narrow[0, 0], 0.0, narrow[0, 1]], [*narrow[1].tolist(), 0.0]]


def test_returns_use_estimates_before_whitening() -> None:
    # With lam = 1 they are the discounted rewards to go, for any values.
    case = replace(make_case(8), lam=1.0, gamma=1.0)
    _, returns = estimate("gae", case)
    rewards = torch.tensor(case.rewards, dtype=torch.float64) * torch.tensor(case.mask)
    expected = rewards.flip(-1).cumsum(-1).flip(-1) * torch.tensor(case.mask)
    torch.testing.assert_close(returns, expected)


def test_accepts_verls_call() -> None:
    rewards, values, mask = (
        torch.tensor(column, dtype=torch.float64)
        for column in (CASE.rewards, CASE.values, CASE.mask)
    )
    called = compute_gae_advantage_return(rewards, values, mask, 0.5, 0.5)
    for a, b in zip(called, estimate("gae", CASE), strict=True):
        assert torch.equal(a, b)


def test_rejects_values_that_are_not_finite() -> None:
    with pytest.raises(ValueError, match="values of row 1 is inf at token 0"):
        estimate("gae", replace(CASE, values=[[0.0, 0.0], [float("inf"), 0.0]]))


def test_end_of_an_episode_stops_the_estimate() -> None:
    rewards = torch.tensor([1.0, 2.0, 4.0])
    values = torch.tensor([0.5, 0.25, 1.0])
    dones = torch.tensor([False, True, False])
    # Deltas 1 + 0.125 - 0.5, 2 - 0.25, 4 - 1.
    advantages, returns = estimate_advantages(rewards, values, dones, 0.5, 0.5)
    assert advantages.tolist() == [0.625 + 0.25 * 1.75, 1.75, 3.0]
    assert returns.tolist() == [1.5625, 2.0, 4.0]
    assert advantages.dtype == torch.float32


def test_extra_value_bootstraps_the_last_step() -> None:
    rewards, dones = torch.zeros(2, 2, dtype=torch.float64), torch.tensor([[0, 0], [0, 1]])
    values = torch.tensor([[0.0, 0.0, 8.0]] * 2)
    advantages, _ = estimate_advantages(rewards, values, dones, 0.5, 0.5)
    assert advantages.tolist() == [[1.0, 4.0], [0.0, 0.0]]
    assert advantages.dtype == torch.float64


def test_rejects_trajectories_of_other_shapes() -> None:
    with pytest.raises(ValueError, match=r"values \(\.\.\., T\) or \(\.\.\., T \+ 1\); got"):
        estimate_advantages(torch.zeros(3), torch.zeros(5), torch.zeros(3), 1.0, 1.0)
