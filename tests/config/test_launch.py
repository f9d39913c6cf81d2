"""The parts that all commands share."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from slipstream import main_fastrl, main_ppo
from slipstream.config.launch import config_from, exit_status
from slipstream.errors import DataError
from tests.config.launch_lines import arguments
from tests.run.helpers import save_tiny_model


@pytest.mark.parametrize("code", [None, 0])
def test_code_that_exits_in_a_command_is_not_success(
    code: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    def exits() -> int:
        sys.exit(code)

    assert exit_status(exits, debug=False) == 1
    assert "remove that call" in capsys.readouterr().err


def test_errors_after_loading_name_the_line_that_sets_the_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("actor_rollout_ref:\n  model:\n    path: m\ndata:\n  train_files: [nothing]\n")
    args = argparse.Namespace(recipe=None, config=file, config_name=None, config_path=None)

    def fails() -> int:
        config_from(args, [])
        raise DataError("data.train_files=nothing does not exist; set data.train_files")

    assert exit_status(fails, debug=False) == DataError.exit_code
    assert f"({file} sets data.train_files in line 5)" in capsys.readouterr().err

    def other() -> int:
        raise DataError("data.train_files=nothing does not exist; set data.train_files")

    exit_status(other, debug=False)
    assert str(file) not in capsys.readouterr().err


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny model and data files."""
    folder = tmp_path_factory.mktemp("lines")
    save_tiny_model(folder / "model")
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{i} + 1 ="}],
            "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
        }
        for i in range(512)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "train.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[:4]), folder / "test.parquet")
    return folder


@pytest.mark.parametrize("name", ["dapo_longer_context", "ppo_newer", "fastrl_off"])
def test_launch_lines_pass_a_dry_run(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = arguments(name, str(folder), str(folder / "model"))
    line += ["trainer.n_gpus_per_node=0", "trainer.logger=[console]", "trainer.device=cpu"]
    line += [f"trainer.default_local_dir={folder / 'run'}"]
    # The model has 256 positions, and only the first line changes that.
    if name != "dapo_longer_context":
        line += ["data.max_prompt_length=64", "data.max_response_length=64"]
    launcher = main_fastrl if name.startswith("fastrl") else main_ppo
    assert launcher.main([*line, "--dry-run"]) == 0
    assert "WARNING: actor_rollout_ref.rollout.name=" in capsys.readouterr().err
    assert not (folder / "run").exists()
