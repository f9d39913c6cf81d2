"""verl's `RayPPOTrainer` runs Slipstream's training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.compat import verl
from slipstream.compat.verl import DataProto, RayPPOTrainer, RLHFDataset
from slipstream.config.load import load_config, to_yaml
from slipstream.data.tokenizer import build_tokenizer
from slipstream.errors import ConfigError
from tests.run.helpers import metrics_of, records_of, rl_only


class Sums(RLHFDataset):
    def __init__(self, size: int) -> None:
        self.dataframe = list(range(size))
        super().__init__(tokenizer=build_tokenizer())

    def __getitem__(self, index: int) -> dict[str, Any]:
        assert self.tokenizer is not None
        return {**self.tokenizer(f"1 + {index} ="), "state": index, "data_source": "sums"}


def reward(data: DataProto) -> torch.Tensor:
    """Return token rewards in verl's form: the reward is at the last token."""
    rewards = torch.zeros(data.batch["responses"].shape)
    length = data.batch["response_mask"].sum(1)
    for row in range(len(data)):
        rewards[row, length[row] - 1] = float(length[row] % 3 + data[row].batch["state"])
    return rewards


def trainer(folder: Path, *overrides: str, **parts: Any) -> RayPPOTrainer:
    """Return the trainer of a tiny run without a task, configured by a file."""
    line = rl_only(folder, "data.task=null", *overrides)
    config = load_config([text for text in line if "=" in text], recipe="tiny")
    path = folder.parent / "config.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    return RayPPOTrainer(path, **parts)


def test_data_sets_and_reward_functions_are_passed_as_objects(tmp_path: Path) -> None:
    seen: list[int] = []

    def collate(items: list[dict[str, Any]]) -> dict[str, Any]:
        seen.append(len(items))
        return verl.collate_fn([{**item, "note": "seen"} for item in items])

    def judged(solution_str: str, **_: Any) -> dict[str, float]:
        return {"score": 1.0, "acc": 0.25}

    run = trainer(
        tmp_path / "run",
        "trainer.test_freq=2",
        reward_fn=reward,
        val_reward_fn=judged,
        train_dataset=Sums(6),
        val_dataset=Sums(3),
        collate_fn=collate,
        train_sampler=torch.utils.data.SequentialSampler(range(6)),
    )
    run.init_workers()
    run.fit()
    assert run.folder == tmp_path / "run"
    records = records_of(tmp_path / "run" / "rollouts")
    states = [[row["extra_info"]["state"] for row in rows] for rows in records.values()]
    assert states == [[0, 0, 1, 1], [2, 2, 3, 3]]
    for row in (row for rows in records.values() for row in rows):
        assert row["score"] == len(row["response_ids"]) % 3 + row["extra_info"]["state"]
        assert row["extra_info"]["note"] == "seen"
    assert seen == [1] * 4
    assert metrics_of(tmp_path / "run")[2]["val-core/sums/acc/mean@1"] == 0.25


def test_a_loaded_manager_scores_single_responses(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return extra_info['state']\n"
    )
    manager = verl.load_reward_manager(
        {"custom_reward_function": {"path": str(path)}}, build_tokenizer()
    )
    trainer(tmp_path / "run", reward_fn=manager, train_dataset=Sums(4)).fit()
    rows = [row for rows in records_of(tmp_path / "run" / "rollouts").values() for row in rows]
    assert [row["score"] for row in rows] == [row["extra_info"]["state"] for row in rows]


def test_unsupported_arguments_raise_or_warn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    with pytest.raises(ConfigError, match="leave the processor out"):
        trainer(folder, processor=object(), train_dataset=Sums(4))
    with pytest.raises(ConfigError, match="there is nothing to train"):
        trainer(folder, "sft.total_training_steps=0")
    with pytest.raises(ConfigError, match=r"data\.task=countdown .*set data\.task=null"):
        RayPPOTrainer(
            ["data.task=countdown", "actor_rollout_ref.model.init.num_layers=2"],
            train_dataset=Sums(4),
        )
    with pytest.raises(ConfigError, match="reward_fn must be a function or a manager, got 5"):
        trainer(folder, train_dataset=Sums(4), reward_fn=5).fit()
    assert "has no effect" not in caplog.text
    result = trainer(
        folder, train_dataset=Sums(4), role_worker_mapping={}, resource_pool_manager=object()
    )
    assert "RayPPOTrainer(role_worker_mapping=...) has no effect: trainer.nnodes and" in (
        caplog.text
    )
    assert result.config.trainer.total_training_steps == 2


def test_device_name_sets_trainer_device(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    result = trainer(tmp_path / "run", train_dataset=Sums(4), device_name="cpu")
    assert result.config.trainer.device == "cpu"
    result = trainer(tmp_path / "run", train_dataset=Sums(4), device_name="npu")
    assert result.config.trainer.device == "auto"
    assert "trainer.device=npu" in caplog.text
    with pytest.raises(ConfigError, match=r"trainer\.device"):
        trainer(tmp_path / "run", train_dataset=Sums(4), device_name="tpu")
