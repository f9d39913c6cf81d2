"""The parts that all commands share."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from slipstream.config.launch import config_from, exit_status
from slipstream.errors import DataError


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
