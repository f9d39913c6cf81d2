"""The critic that the options of `critic` give."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipstream.build.algorithm import critic_updates, wants_critic
from slipstream.build.critic import make_critic
from slipstream.build.policy import make_decoder
from slipstream.checkpoint.state import critic_folder, critic_optimizer_file
from slipstream.checkpoint.tree import save_tree
from slipstream.config import Config, Hardware, load_config
from slipstream.data.tokenizer import build_tokenizer
from slipstream.errors import CheckpointError, ConfigError
from slipstream.models import Decoder
from slipstream.models.critic_io import save_critic
from slipstream.models.value_model import ValueModel
from slipstream.training.columns import train_batch
from slipstream.training.compute_thread import ComputeThread
from slipstream.training.critic import Critic
from slipstream.types import TrainBatch, TrainRow


def load(*overrides: str) -> Config:
    return load_config(overrides, recipe="tiny", hardware=Hardware(gpus=0), notify=lambda _: None)


@pytest.fixture
def compute() -> Iterator[ComputeThread]:
    thread = ComputeThread()
    yield thread
    thread.close()


def policy_of(config: Config) -> Decoder:
    return make_decoder(config, build_tokenizer(), None)


def make(
    config: Config,
    compute: ComputeThread,
    policy: Decoder | None = None,
    resume: Path | None = None,
) -> Critic:
    policy = policy or policy_of(config)
    return compute.run(
        lambda: make_critic(config, build_tokenizer(), policy, compute, rl_steps=2, resume=resume)
    )


def batch() -> TrainBatch:
    values = [0.0] * 9
    rows = [
        TrainRow(
            tokens=[1 + i, *range(2, 10)],
            loss_mask=[0.0, *[1.0] * 8],
            returns=[float(i)] * 9,
            values=values,
        )
        for i in range(3)
    ]
    return train_batch(rows)


def test_critic_is_enabled_by_gae_or_by_critic_enable() -> None:
    config = load()
    gae = replace(config, algorithm=replace(config.algorithm, adv_estimator="gae"))
    for enable, expected in ((None, (False, True)), (True, (True, True)), (False, (False, False))):
        both = [replace(c, critic=replace(c.critic, enable=enable)) for c in (config, gae)]
        assert tuple(map(wants_critic, both)) == expected


def test_critic_epochs_and_mini_batch_size_default_to_the_actors() -> None:
    actor = "actor_rollout_ref.actor"
    given = load(f"{actor}.ppo_mini_batch_size=1", f"{actor}.ppo_epochs=3")
    assert critic_updates(given) == (3, 1)
    own = load(f"{actor}.ppo_epochs=3", "critic.ppo_epochs=2", "critic.ppo_mini_batch_size=1")
    assert critic_updates(own) == (2, 1)
    assert critic_updates(load()) == (1, 2)


def test_critic_starts_from_policy_weights_with_its_own_learning_rate(
    compute: ComputeThread,
) -> None:
    config = load("critic.optim.lr=0.01", "critic.ppo_micro_batch_size_per_gpu=1")
    policy = policy_of(config)
    critic = make(config, compute, policy)
    assert torch.equal(critic.model.model.embed_tokens.weight, policy.model.embed_tokens.weight)
    assert critic.update(batch()).wait()["critic/lr"] == 0.01
    assert not torch.equal(
        critic.model.model.embed_tokens.weight, policy.model.embed_tokens.weight
    ) or torch.any(critic.model.score.weight != 0)


def test_resume_restores_critic_weights_and_optimizer(
    compute: ComputeThread, tmp_path: Path
) -> None:
    config = load("critic.optim.lr=0.01")
    one = make(config, compute)
    one.update(batch()).wait()
    one.save(critic_folder(tmp_path))
    save_tree(critic_optimizer_file(tmp_path), one.state_dict())
    other = make(config, compute, resume=tmp_path)
    assert torch.equal(one.values(batch()).wait(), other.values(batch()).wait())
    assert one.update(batch()).wait() == other.update(batch()).wait()
    assert torch.equal(one.values(batch()).wait(), other.values(batch()).wait())


def test_resume_refuses_a_checkpoint_without_a_critic(
    compute: ComputeThread, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=r"has no critic, .* start a new run from its weigh"):
        make(load(), compute, resume=tmp_path)


def test_critic_that_does_not_fit_the_policy_is_refused(
    compute: ComputeThread, tmp_path: Path
) -> None:
    config = load()
    model = ValueModel.of(policy_of(config))
    save_critic(model, tmp_path / "same", save_tokenizer=build_tokenizer().save_pretrained)
    make(load(f"critic.model.path={tmp_path}/same"), compute)
    save_critic(model, tmp_path / "other", save_tokenizer=build_tokenizer(240).save_pretrained)
    with pytest.raises(CheckpointError, match=r"other: the critic's tokenizer is not the policy's"):
        make(load(f"critic.model.path={tmp_path}/other"), compute)
    wider = replace(model.config, vocab_size=240)
    save_critic(ValueModel(wider), tmp_path / "wider")
    with pytest.raises(CheckpointError, match="the critic's vocabulary has 240 tokens"):
        make(load(f"critic.model.path={tmp_path}/wider"), compute)
    save_critic(ValueModel(replace(model.config, max_position_embeddings=16)), tmp_path / "short")
    with pytest.raises(ConfigError, match="but the model has max_position_embeddings=16"):
        make(load(f"critic.model.path={tmp_path}/short"), compute)
