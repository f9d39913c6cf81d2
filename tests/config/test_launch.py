"""The parts that all commands share."""

from __future__ import annotations

import sys

import pytest

from slipstream.config.launch import exit_status


@pytest.mark.parametrize("code", [None, 0])
def test_code_that_exits_in_a_command_is_not_success(
    code: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    def exits() -> int:
        sys.exit(code)

    assert exit_status(exits, debug=False) == 1
    assert "remove that call" in capsys.readouterr().err
