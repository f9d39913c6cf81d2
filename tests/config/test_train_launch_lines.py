"""The launch lines run with small files: lines for SFT, and lines that name files of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream import fsdp_sft_trainer, main_fastrl, main_ppo, sft_trainer
from tests.config.train_launch_lines import SFT_LINES, command, write_files

LAUNCHERS: dict[str, Any] = {
    module.__name__.rpartition(".")[2]: module
    for module in (fsdp_sft_trainer, main_fastrl, main_ppo, sft_trainer)
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lines")
    write_files(folder)
    return folder


@pytest.mark.parametrize("name", SFT_LINES)
def test_lines_for_sft_are_accepted(
    name: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher, line = command(name, root, None)
    assert LAUNCHERS[launcher].main([*line[:-1], "--cfg", "job"]) == 0
    sft = yaml.safe_load(capsys.readouterr().out)["sft"]
    assert (sft["train_batch_size"], sft["total_training_steps"]) == (256, 2 * (1600 // 256))


@pytest.mark.parametrize("name", ["grpo_lora_adapter", "ppo_learned_reward", "fastrl_drafter"])
def test_lines_that_name_an_adapter_or_models_pass_a_dry_run(
    name: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    launcher, line = command(name, root, None)
    assert LAUNCHERS[launcher].main([*line, "trainer.logger=[console]"]) == 0
    assert not (root / "runs").exists()


def test_lines_that_train_are_shrunk(root: Path) -> None:
    _, line = command("dapo_recipe", root, 2)
    settings = dict(text.split("=", 1) for text in line)
    assert settings["data.train_batch_size"] == "4"
    assert settings["data.gen_batch_size"] == "12"
    assert settings["actor_rollout_ref.rollout.n"] == "4"
    assert settings["reward_model.overlong_buffer.len"] == "4"
    assert settings["trainer.total_training_steps"] == "2"
    assert settings["custom_reward_function.path"] == str(root / "data" / "reward.py")
