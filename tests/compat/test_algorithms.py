"""Functions with verl's names and arguments return the same numbers as Slipstream's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slipstream.algorithms import get_policy_loss_fn
from slipstream.compat import verl
from slipstream.compat.verl import DataProto


def test_ppo_loss_matches_a_hand_calculation() -> None:
    old, new = torch.zeros(1, 3), torch.tensor([[0.0, 1.0, -1.0]])
    advantages, mask = torch.tensor([[1.0, 1.0, -1.0]]), torch.ones(1, 3)
    loss, metrics = verl.compute_ppo_loss(old, new, advantages, mask)
    # Ratios 1, e, 1/e, clipped to 1, 1.2, 0.8: -(1 + 1.2 - 0.8) / 3.
    assert loss.item() == pytest.approx(-1.4 / 3)
    assert float(metrics["actor/pg_clipfrac"]) == pytest.approx(2 / 3)


@pytest.mark.parametrize("kind", ["mapping", "object"])
def test_ppo_loss_uses_the_actor_settings(kind: str) -> None:
    torch.manual_seed(0)
    old, new, advantages = torch.randn(3, 2, 5)
    mask = torch.ones(2, 5)
    settings: dict[str, Any] = {
        "clip_ratio": 0.1,
        "loss_agg_mode": "seq-mean-token-mean",
        "policy_loss": {"loss_mode": "gspo"},
    }
    config: Any = settings
    if kind == "object":
        from omegaconf import OmegaConf

        config = OmegaConf.create(settings)
    loss, _ = verl.compute_ppo_loss(old, new, advantages, mask, config)
    expected, _ = get_policy_loss_fn("gspo")(
        old, new, advantages, mask, "seq-mean-token-mean", {"clip_ratio": 0.1}, None
    )
    assert loss.item() == expected.item()
    assert loss.item() != verl.compute_ppo_loss(old, new, advantages, mask)[0].item()


def test_kl_penalty_and_trajectory_advantages() -> None:
    left, right = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 1.0])
    assert verl.compute_kl_penalty(left, right).tolist() == [-1.0, 0.0]
    assert verl.compute_kl_penalty(left, right, "mse").tolist() == [0.5, 0.0]
    rewards, values, dones = torch.ones(2), torch.zeros(2), torch.tensor([0.0, 1.0])
    advantages, returns = verl.estimate_advantages(rewards, values, dones, 0.5, 1.0)
    assert advantages.tolist() == returns.tolist() == [1.5, 1.0]
    assert verl.advantage_estimation is verl.estimate_advantages


def test_compute_advantage_adds_advantages_and_returns() -> None:
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 3.0], [2.0, 0.0]])
    data = DataProto(
        {"token_level_rewards": rewards, "response_mask": torch.ones(4, 2)},
        {"uid": ["a", "a", "b", "b"]},
    )
    result = verl.compute_advantage(data, "grpo", norm_adv_by_std_in_grpo=False)
    assert result is data
    assert data.batch["advantages"].tolist() == [[0.5, 0.5], [-0.5, -0.5], [0.5, 0.5], [-0.5, -0.5]]
    again = DataProto(
        {
            "token_level_scores": rewards,
            "response_mask": torch.ones(4, 2),
            "values": torch.zeros(4, 2),
        }
    )
    verl.compute_advantages(again, verl.AdvantageEstimator.GAE, gamma=1.0, lam=1.0)
    assert again.batch["returns"].tolist() == [[1.0, 1.0], [0.0, 0.0], [3.0, 3.0], [2.0, 0.0]]


def test_compute_advantage_overwrites_earlier_results() -> None:
    fields = {"token_level_rewards": torch.ones(2, 1), "response_mask": torch.ones(2, 1)}
    data = DataProto(fields, {"uid": ["a", "b"]})
    verl.compute_advantage(data, "grpo")
    data.batch["token_level_rewards"] = torch.tensor([[1.0], [3.0]])
    verl.compute_advantage(data, "grpo")
    assert data.batch["advantages"].tolist() == [[1.0], [3.0]]
    with pytest.raises(ValueError, match=r"grpo compares .*non_tensor_batch\['uid'\]"):
        verl.compute_advantage(DataProto(fields), "grpo")
