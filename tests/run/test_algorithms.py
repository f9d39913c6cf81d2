"""Runs with algorithms other than GRPO, through the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slipstream.checkpoint.state import critic_folder, critic_optimizer_file
from slipstream.cli import main
from slipstream.models.critic_io import load_critic
from tests.run.helpers import (
    ACTOR,
    ROLLOUT,
    assert_same_result,
    metrics_of,
    result_of,
    tiny,
    without_validation,
    write_reward,
)

GAE = (
    "algorithm.adv_estimator=gae",
    "critic.optim.lr=0.01",
    f"{ACTOR}.optim.lr=0.01",
    "trainer.critic_warmup=2",
    "trainer.save_freq=1",
    "trainer.total_training_steps=3",
)


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reward(tmp_path_factory.mktemp("reward"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, reward: Path) -> Path:
    """The folder of a run with SFT and with RL that trains a critic."""
    folder = tmp_path_factory.mktemp("run") / "run"
    assert main(tiny(folder, *GAE, reward=reward)) == 0
    return folder


def test_critic_is_trained_and_saved_with_the_policy(run: Path) -> None:
    metrics = metrics_of(run)
    assert ["actor/grad_norm" in metrics[step] for step in (1, 2, 3)] == [False, True, True]
    assert metrics[1]["critic/values/max"] == 0.0
    assert metrics[2]["critic/values/max"] != 0.0
    assert all(metrics[step]["critic/vf_loss"] > 0 for step in (1, 2, 3))
    checkpoint = run / "global_step_3"
    assert critic_optimizer_file(checkpoint).is_file()
    critic = load_critic(critic_folder(checkpoint), device=torch.device("cpu"))
    assert critic.score.weight.abs().max() > 0


def test_resumed_run_with_critic_equals_uninterrupted_run(
    run: Path, reward: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    assert main(tiny(folder, *GAE, "trainer.total_training_steps=2", reward=reward)) == 0
    assert main(tiny(folder, *GAE, reward=reward)) == 0
    # Step 2 was the last one of the shorter run, which therefore validated after it.
    one, other = without_validation(result_of(folder), 2), without_validation(result_of(run), 2)
    assert_same_result(one, other)
    one_critic, other_critic = (
        dict(
            load_critic(
                critic_folder(r / "global_step_3"), device=torch.device("cpu")
            ).named_parameters()
        )
        for r in (folder, run)
    )
    for name, weight in one_critic.items():
        assert torch.equal(weight, other_critic[name]), name


@pytest.mark.parametrize("lora", [0, 4])
def test_full_kl_is_zero_in_step_1_and_positive_in_step_2(
    lora: int, reward: Path, tmp_path: Path
) -> None:
    line = tiny(
        tmp_path / "run",
        f"actor_rollout_ref.model.lora_rank={lora}",
        f"{ACTOR}.optim.lr=0.01",
        f"{ACTOR}.use_kl_loss=true",
        f"{ACTOR}.kl_loss_type=full",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_penalty=full",
        "trainer.total_training_steps=2",
        reward=reward,
    )
    assert main(line) == 0
    metrics = metrics_of(tmp_path / "run")
    assert metrics[1]["actor/kl_loss"] == pytest.approx(0.0, abs=1e-6)
    assert metrics[2]["actor/kl_loss"] > 1e-5
    # The penalty in the reward is computed before the update, so it is zero in step 1, too.
    assert metrics[1]["actor/reward_kl_penalty"] == pytest.approx(0.0, abs=1e-6)
    assert metrics[2]["actor/reward_kl_penalty"] > 1e-5


def test_full_kl_penalty_lowers_rewards_without_a_kl_loss(reward: Path, tmp_path: Path) -> None:
    line = tiny(
        tmp_path / "run",
        f"{ACTOR}.optim.lr=0.01",
        "algorithm.adv_estimator=reinforce_plus_plus",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_penalty=full_forward",
        "trainer.total_training_steps=2",
        reward=reward,
    )
    assert main(line) == 0
    metrics = metrics_of(tmp_path / "run")
    assert metrics[2]["actor/reward_kl_penalty"] > 1e-5
    assert metrics[2]["critic/rewards/mean"] < metrics[2]["critic/score/mean"]
    assert "actor/kl_loss" not in metrics[2]


def test_on_policy_distillation_gives_advantages_of_both_signs(
    run: Path, reward: Path, tmp_path: Path
) -> None:
    line = tiny(
        tmp_path / "run",
        "algorithm.adv_estimator=on_policy_distillation",
        f"actor_rollout_ref.ref.path={run}",
        f"{ACTOR}.optim.lr=0.001",
        reward=reward,
    )
    assert main(line) == 0
    metrics = metrics_of(tmp_path / "run")
    assert metrics[1]["critic/advantages/min"] < 0 < metrics[1]["critic/advantages/max"]


def test_support_replay_keeps_ratios_at_one_with_truncated_sampling(
    reward: Path, tmp_path: Path
) -> None:
    line = tiny(
        tmp_path / "run",
        f"{ROLLOUT}.top_k=5",
        f"{ROLLOUT}.top_p=0.9",
        f"{ACTOR}.optim.lr=0.01",
        f"{ACTOR}.ppo_mini_batch_size=1",
        "algorithm.rollout_correction.support_replay=true",
        "algorithm.rollout_correction.rollout_is=token",
        reward=reward,
    )
    assert main(line) == 0
    for step, metrics in metrics_of(tmp_path / "run").items():
        if step == 0:
            continue
        assert metrics["rollout_corr/outside_support"] == 0
        # The policy is the old one, so all ratios are 1. Log-probs over the whole vocabulary would
        # give other ratios.
        assert metrics["rollout_corr/kl"] == pytest.approx(0.0, abs=1e-6)
        assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(1.0, abs=1e-5)
        assert metrics["rollout_corr/training_ppl"] < 5
        assert metrics["actor/grad_norm"] > 0
