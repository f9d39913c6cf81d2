"""The parts that all commands share."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from slipstream import main_fastrl, main_ppo
from slipstream.build.policy import make_decoder
from slipstream.config import Hardware, load_config
from slipstream.config.launch import exit_status
from slipstream.data.tokenizer import build_tokenizer
from slipstream.models import save_checkpoint
from tests.config.launch_lines import arguments


@pytest.mark.parametrize("code", [None, 0])
def test_code_that_exits_in_a_command_is_not_success(
    code: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    def exits() -> int:
        sys.exit(code)

    assert exit_status(exits, debug=False) == 1
    assert "remove that call" in capsys.readouterr().err


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny model and data files."""
    folder = tmp_path_factory.mktemp("lines")
    tokenizer = build_tokenizer()
    config = load_config(recipe="tiny", hardware=Hardware(gpus=0), notify=lambda _: None)
    decoder = make_decoder(config, tokenizer, None)
    save_checkpoint(decoder, folder / "model", save_tokenizer=tokenizer.save_pretrained)
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
