"""verl's losses and estimators under verl's names, with values computed by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from slipstream.compat.verl.protocol import DataProto
from slipstream.compat.verl.trainer.ppo import core_algos
from slipstream.compat.verl.trainer.ppo.ray_trainer import (
    apply_kl_penalty,
    compute_response_mask,
)
from slipstream.compat.verl.workers.config import ActorConfig

MASK = torch.tensor([[1.0, 1.0], [1.0, 0.0]])


def test_estimators_are_those_of_the_registry() -> None:
    rewards = torch.tensor([[0.0, 1.0], [3.0, 0.0]])
    advantages, _ = core_algos.compute_grpo_outcome_advantage(
        rewards, MASK, ["a", "a"], norm_adv_by_std_in_grpo=False
    )
    assert advantages.tolist() == [[-1.0, -1.0], [1.0, 0.0]]
    advantages, _ = core_algos.compute_rloo_outcome_advantage(rewards, MASK, ["a", "a"])
    assert advantages.tolist() == [[-2.0, -2.0], [2.0, 0.0]]
    assert core_algos.compute_remax_outcome_advantage(rewards, torch.tensor([1.0, 1.0]), MASK)[
        0
    ].tolist() == [[0.0, 0.0], [2.0, 0.0]]


def test_losses_take_verls_configuration() -> None:
    old, new = torch.zeros(2, 2), torch.full((2, 2), math.log(1.5))
    config = ActorConfig(clip_ratio=0.2)
    loss, metrics = core_algos.compute_policy_loss_vanilla(
        old, new, torch.ones(2, 2), MASK, "token-mean", config
    )
    assert float(loss) == pytest.approx(-1.2)
    assert float(metrics["actor/pg_clipfrac"]) == pytest.approx(1.0)
    assert core_algos.get_policy_loss_fn("vanilla") is core_algos.compute_policy_loss_vanilla


def test_entropy_loss_and_rewards() -> None:
    logits = torch.tensor([[[0.0, 0.0], [0.0, math.log(3.0)]], [[5.0, 5.0], [1.0, 9.0]]])
    one, two = math.log(2), -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    expected = (one + two + one) / 3
    assert float(core_algos.compute_entropy_loss(logits, MASK)) == pytest.approx(expected)
    summed = core_algos.compute_entropy_loss(logits, MASK, "token-sum")
    assert float(summed) == pytest.approx(3 * expected)
    scores, kl = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.5, -1.0]])
    rewards = core_algos.compute_rewards(scores, kl, torch.zeros(1, 2), 0.1)
    assert rewards.tolist() == [pytest.approx([0.95, 2.1])]


def test_kl_penalty_forward_ignores_the_suffix() -> None:
    one, two = torch.tensor([-1.0]), torch.tensor([-2.0])
    assert core_algos.kl_penalty_forward(one, two, "k2").tolist() == [0.5]
    forward = core_algos.kl_penalty_forward(one, two, "k3+")
    assert forward.tolist() == pytest.approx([math.exp(-1) + 1 - 1])
    with pytest.raises(ValueError, match="unknown kl penalty 'k9'"):
        core_algos.kl_penalty_forward(one, two, "k9")


@pytest.mark.parametrize("form", [dict, lambda **fields: SimpleNamespace(**fields)])
def test_kl_controllers_are_made_from_their_settings(form: type) -> None:
    fixed = core_algos.get_kl_controller(form(type="fixed", kl_coef=0.2))
    assert isinstance(fixed, core_algos.FixedKLController)
    assert fixed.value == 0.2
    moving = core_algos.get_kl_controller(
        form(type="adaptive", kl_coef=0.1, target_kl=0.5, horizon=100)
    )
    moving.update(0.55, 10)
    assert moving.value == pytest.approx(0.1 * (1 + 0.1 * 10 / 100))
    with pytest.raises(ValueError, match="unknown KL controller 'other'"):
        core_algos.get_kl_controller(form(type="other", kl_coef=0.1))


def test_pf_ppo_draws_rows_with_replacement() -> None:
    scores = torch.tensor([[0.0, 0.0], [0.0, 1.0]])
    data = DataProto({"token_level_scores": scores}, {"name": ["a", "b"]}, {"step": 1})
    drawn = core_algos.compute_pf_ppo_reweight_data(data, "pow", 2.0)
    assert drawn.non_tensor_batch["name"].tolist() == ["b", "b"]
    assert drawn.meta_info == {"step": 1}
    with pytest.raises(ValueError, match="reweight_method must be one of"):
        core_algos.compute_pf_ppo_reweight_data(data, "other")


def test_apply_kl_penalty_subtracts_from_the_scores() -> None:
    data = DataProto(
        {
            "responses": torch.zeros(2, 2),
            "attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]]),
            "token_level_scores": torch.tensor([[0.0, 1.0], [2.0, 0.0]]),
            "old_log_probs": torch.tensor([[-1.0, -1.0], [-1.0, -9.0]]),
            "ref_log_prob": torch.tensor([[-2.0, -1.0], [-1.5, 0.0]]),
        }
    )
    assert compute_response_mask(data).tolist() == [[1, 1], [1, 0]]
    result, metrics = apply_kl_penalty(data, core_algos.FixedKLController(0.1))
    assert result is data
    rewards = data.batch["token_level_rewards"].tolist()
    assert rewards == [pytest.approx([-0.1, 1.0]), pytest.approx([1.95, 0.0])]
    # The mean over rows of the means over their tokens: (0.5 + 0.5) / 2.
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.5)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.1
