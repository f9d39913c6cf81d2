"""Notices about what warm-up and schedules count, and the schedules that a configuration makes."""

from __future__ import annotations

import pytest

from slipstream.build.critic import critic_optim
from slipstream.build.policy import actor_optim, optim_settings
from slipstream.config import Config, Hardware, load_config

ACTOR = "actor_rollout_ref.actor"
TWO = ("data.train_batch_size=8", f"{ACTOR}.ppo_mini_batch_size=4", f"{ACTOR}.ppo_epochs=3")


def load(*overrides: str) -> tuple[Config, list[str]]:
    notices: list[str] = []
    hardware = Hardware(gpus=0)
    config = load_config(overrides, recipe="tiny", hardware=hardware, notify=notices.append)
    return config, notices


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        ((), []),
        (TWO, []),
        ((f"{ACTOR}.optim.lr_warmup_steps=2",), ["zero_indexed_step=false"]),
        (
            (f"{ACTOR}.optim.lr_warmup_steps=2", *TWO),
            ["lr_schedule_unit=optimizer_step", "zero_indexed_step=false"],
        ),
        (
            (
                f"{ACTOR}.optim.lr_warmup_steps=2",
                f"{ACTOR}.optim.lr_schedule_unit=rl_step",
                f"{ACTOR}.optim.zero_indexed_step=true",
                *TWO,
            ),
            [],
        ),
        ((f"{ACTOR}.optim.lr_scheduler_type=cosine", *TWO), ["lr_schedule_unit=optimizer_step"]),
    ],
)
def test_a_notice_names_the_key_if_steps_may_be_read_differently(
    overrides: tuple[str, ...], keys: list[str]
) -> None:
    _, notices = load(*overrides)
    assert len(notices) == len(keys)
    for notice, key in zip(notices, keys, strict=True):
        assert f"{ACTOR}.optim.{key}" in notice


def test_the_notice_of_the_critic_names_its_own_optimizer_steps() -> None:
    _, notices = load(*TWO, "algorithm.adv_estimator=gae", "critic.enable=true",
                      "critic.optim.lr_scheduler_type=cosine", "critic.ppo_epochs=1")  # fmt: skip
    assert any(
        "critic.optim.lr_schedule_unit=optimizer_step" in n and "2 optimizer steps" in n
        for n in notices
    )


def rates(config: Config, steps: int) -> list[float]:
    settings = actor_optim(config, rl_steps=20)
    return [settings.lr * settings.factor(step) for step in range(steps)]


def test_warm_up_counts_rl_steps_from_0_as_in_verl() -> None:
    """10 warm-up steps, several optimizer steps in an RL step: 0, 1e-7, 2e-7 in RL steps 1 to 3."""
    config, _ = load(*TWO, f"{ACTOR}.optim.lr=1e-6", f"{ACTOR}.optim.lr_warmup_steps=10")
    assert rates(config, 3) == pytest.approx([0.0, 1e-7, 2e-7], rel=1e-12)
    assert actor_optim(config, rl_steps=20).total_steps == 20
    assert critic_optim(config, rl_steps=20).total_steps == 20


def test_optimizer_steps_are_counted_on_request() -> None:
    config, _ = load(
        *TWO,
        f"{ACTOR}.optim.lr=1e-6",
        f"{ACTOR}.optim.lr_warmup_steps=10",
        f"{ACTOR}.optim.lr_schedule_unit=optimizer_step",
        f"{ACTOR}.optim.zero_indexed_step=false",
        "critic.optim.lr_schedule_unit=optimizer_step",
        "critic.ppo_epochs=1",
    )
    assert rates(config, 3) == pytest.approx([1e-7, 2e-7, 3e-7], rel=1e-12)
    # 20 RL steps of 2 mini-batches; 3 epochs of the policy and 1 of the critic.
    assert actor_optim(config, rl_steps=20).total_steps == 120
    assert critic_optim(config, rl_steps=20).total_steps == 40


def test_the_warm_up_ratio_is_a_share_of_all_rl_steps() -> None:
    config, _ = load(*TWO, f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1")
    assert actor_optim(config, rl_steps=20).warmup_steps == 2


def test_zero_indexed_step_false_shifts_the_decay_in_rl_but_not_in_sft() -> None:
    """A linear decay over 4 steps: RL ends at the minimum, and SFT one step above it."""
    sections = (f"{ACTOR}.optim", "critic.optim", "sft.optim")
    config, _ = load(
        *(f"{key}.lr_scheduler_type=linear" for key in sections),
        *(f"{key}.zero_indexed_step=false" for key in sections),
    )
    rl = [actor_optim(config, rl_steps=4), critic_optim(config, rl_steps=4)]
    sft = optim_settings(config.sft.optim, 4, key="sft.optim")
    for settings in rl:
        assert [settings.factor(step) for step in range(4)] == [0.75, 0.5, 0.25, 0.0]
    assert [sft.factor(step) for step in range(4)] == [1.0, 0.75, 0.5, 0.25]
