"""Files that start from a configuration of VERL, as VERL's users write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream import main_ppo
from slipstream.config.bases import BASES, GROUPS, bases_folder

MINE = """
hydra:
  searchpath:
    - file://verl/trainer/config
defaults:
  - ppo_trainer
  - override actor@actor_rollout_ref.actor: megatron_actor
  - _self_
data:
  train_files: a.parquet
  train_batch_size: 32
  return_raw_chat: True
actor_rollout_ref:
  model: {path: policy}
  rollout:
    name: sglang
    multi_turn: {enable: False, num_repeat_rollouts: 5}
trainer:
  project_name: mine
  default_local_dir: out/${trainer.project_name}/${data.train_batch_size}
"""


def shown(capsys: pytest.CaptureFixture[str], *line: str) -> tuple[dict[str, Any], str]:
    """Return the settings that a line leads to, and the notices."""
    assert main_ppo.main([*line, "--cfg", "job"]) == 0
    captured = capsys.readouterr()
    return yaml.safe_load(captured.out), captured.err


def write(folder: Path, text: str, name: str = "mine") -> tuple[str, ...]:
    (folder / f"{name}.yaml").write_text(text)
    return "--config-path", str(folder), "--config-name", name


def test_a_file_starts_from_verls_configuration(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found, notices = shown(capsys, *write(tmp_path, MINE), "data.train_batch_size=64")
    assert found["data"]["train_files"] == ["a.parquet"]
    assert found["data"]["train_batch_size"] == 64
    assert found["actor_rollout_ref"]["rollout"]["name"] == "embedded"
    assert found["trainer"]["default_local_dir"] == "out/mine/64"
    assert "WARNING: actor_rollout_ref.rollout.name=sglang " in notices
    assert "note: actor_rollout_ref.rollout.multi_turn.num_repeat_rollouts has no" in notices
    # What the file sets is no default that differs.
    assert "trainer.total_epochs=1 (VERL: 30)" in notices
    assert "trainer.max_actor_ckpt_to_keep=3 (VERL: null)" in notices
    assert "data.train_batch_size=16" not in notices


def test_settings_of_hydra_on_the_command_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    line = write(tmp_path, MINE)
    base = tmp_path / "other"
    base.mkdir()
    (base / "ppo_trainer.yaml").write_text("algorithm: {gamma: 0.5, adv_estimator: gae}\n")
    (tmp_path / "mine.yaml").write_text(MINE.replace("  - override", "  # - override"))
    found, notices = shown(
        capsys,
        *line,
        f"hydra.searchpath=[file://{base}]",
        "hydra.run.dir=outputs",
        "++trainer.val_before_train=False",
        "+data.apply_chat_template_kwargs.enable_thinking=False",
        "model_engine=megatron",
        "actor@actor_rollout_ref.actor=dp_actor",
        "~trainer.project_name",
        "~actor_rollout_ref.actor.profiler",
        "~data.sampler",
    )
    assert found["algorithm"]["gamma"] == 0.5
    assert found["trainer"]["val_before_train"] is False
    assert found["data"]["apply_chat_template_kwargs"] == {"enable_thinking": False}
    assert found["trainer"]["project_name"] == "slipstream"
    assert "note: hydra.run.dir has no effect" in notices
    assert "note: model_engine has no effect" in notices
    assert "note: actor@actor_rollout_ref.actor has no effect" in notices
    assert "hydra.searchpath" not in notices


def test_deleting_a_key_that_does_not_exist_is_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = ["data.task=countdown", "trainer.total_training_steps=1", "~trainer.nothing"]
    assert main_ppo.main([*line, "actor_rollout_ref.model.init.num_layers=2"]) == 2
    assert "error: trainer.nothing: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ("--config-name", "ppo_megatron_trainer"),
        ("--config-path=config", "--config-name=ppo_megatron_trainer.yaml"),
        ("--config-dir", "config", "--config-name", "ppo_trainer"),
    ],
)
def test_a_configuration_of_verl_by_name_is_our_default(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    line = ("data.train_files=a.parquet", "actor_rollout_ref.model.path=policy")
    found, _ = shown(capsys, *line)
    assert shown(capsys, *flags, *line)[0] == found


def test_every_base_and_group_has_a_file() -> None:
    with bases_folder() as folder:
        files = {str(path.relative_to(folder)) for path in folder.rglob("*.yaml")}
    groups = {f"{group}/{name}.yaml" for group, names in GROUPS.items() for name in names}
    assert files == {f"{name}.yaml" for name in BASES} | groups
    assert not folder.exists()
