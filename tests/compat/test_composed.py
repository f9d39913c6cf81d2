"""Whole composed configurations of VERL in its classes and functions."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from slipstream.compat.verl import (
    RayPPOTrainer,
    create_rl_dataset,
    create_rl_sampler,
    get_custom_reward_fn,
    load_reward_manager,
)
from slipstream.data.tokenizer import build_tokenizer
from slipstream.errors import ConfigError
from slipstream.rewards.manager import DAPORewardManager, NaiveRewardManager
from tests.config.composed import composed

ROLLOUT = "actor_rollout_ref__rollout"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    row = {"prompt": [{"role": "user", "content": "1 + 1 ="}], "data_source": "openai/gsm8k"}
    row["reward_model"] = {"ground_truth": "2"}  # type: ignore[assignment]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join([json.dumps(row)] * 3))
    return file


def config(**changed: object) -> DictConfig:
    return OmegaConf.create(composed(**changed))


def test_reward_manager_of_a_composed_configuration(caplog: pytest.LogCaptureFixture) -> None:
    # Its engine, GPUs and batch sizes are not those of this machine, and do not matter here.
    manager = load_reward_manager(config(), build_tokenizer(), num_examine=0).manager
    assert type(manager) is NaiveRewardManager
    given = config(
        reward__reward_manager__name="dapo",
        reward_model__overlong_buffer={"enable": True, "len": 4, "penalty_factor": 1.0},
    )
    assert type(load_reward_manager(given, build_tokenizer()).manager) is DAPORewardManager
    assert get_custom_reward_fn(config()) is None
    assert not [record for record in caplog.records if "no effect" in record.message]


def test_data_set_of_the_section_of_a_composed_configuration(rows: Path) -> None:
    data = config(data__shuffle=False).data
    dataset = create_rl_dataset([str(rows)], data, build_tokenizer())
    assert len(dataset) == 3
    assert list(create_rl_sampler(data, dataset)) == [0, 1, 2]


def test_trainer_of_a_composed_configuration(
    rows: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    changed = {
        f"{ROLLOUT}__name": "vllm",
        f"{ROLLOUT}__tensor_model_parallel_size": 4,
        "actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": 2,
        "actor_rollout_ref__model__path": "policy",
        "trainer__device": "cpu",
        "trainer__n_gpus_per_node": 1,
        "trainer__default_local_dir": str(tmp_path / "run"),
        "data__train_files": str(rows),
    }
    with caplog.at_level(logging.WARNING):
        trainer = RayPPOTrainer(config(**changed), build_tokenizer())
    assert trainer.config.algorithm.adv_estimator == "gae"
    assert trainer.folder == tmp_path / "run"
    about = [record.message.partition(" ")[0] for record in caplog.records]
    assert about == [
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.tensor_model_parallel_size",
    ]


def test_trainer_refuses_what_it_cannot_do_in_one_error() -> None:
    with pytest.raises(ConfigError) as caught:
        RayPPOTrainer(config(distillation__enabled=True, **{f"{ROLLOUT}__quantization": "fp8"}))
    message = str(caught.value)
    for part in ("distillation.enabled=true: ", "quantization=fp8: ", "trainer.device=cuda: "):
        assert part in message, part
