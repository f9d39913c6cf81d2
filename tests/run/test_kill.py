"""A run that is killed repeatedly has the same final result as an uninterrupted run."""

from __future__ import annotations

from pathlib import Path

from tests.run.conftest import Whole
from tests.run.helpers import assert_same_result, result_of
from tests.run.killing import kill_until_done, line_of

KILLS = 5


def test_killed_run_equals_uninterrupted_run(whole: Whole, tmp_path: Path) -> None:
    line = line_of(tmp_path / "run", whole.reward)
    kills = kill_until_done(line, tmp_path / "run", tmp_path / "output.txt", KILLS, seed=3)
    assert len(kills) >= 3
    assert any(kill.saving for kill in kills)
    assert_same_result(result_of(tmp_path / "run"), whole.result)
