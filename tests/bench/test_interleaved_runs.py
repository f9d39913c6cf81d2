"""Runs that take a step each in turns."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.bench import interleaved_runs
from slipstream.bench.interleaved_runs import interleave, run_interleaved
from slipstream.errors import EngineError

RUN = """import sys
from pathlib import Path
import slipstream.bench.interleaved_runs
from slipstream.metrics.loggers import build_loggers
assert "json.tool" in sys.modules
name, steps, file = sys.argv[1:]
logger = build_loggers(["turns"], Path(), "", "")
for step in range(int(steps)):
    with open(file, "a") as out:
        out.write(name)
    logger.log(step, {})
logger.close()
sys.exit(name == "x")
"""
"""A run whose steps are a letter in a file each, and which fails if that is an x."""

KILLED = RUN.replace("    logger.log", "    kill_if(name == 'k')\n    logger.log").replace(
    "name, steps",
    """import os, signal, threading
def kill_if(wanted):
    if wanted:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
name, steps""",
)
"""And one that is killed while it waits, if that is a k."""


def letters(monkeypatch: pytest.MonkeyPatch, file: Path, code: str = RUN, **steps: int) -> str:
    monkeypatch.setattr(interleaved_runs, "_COMMAND", ("-c", code))
    lines = {name: [name, str(count), str(file)] for name, count in steps.items()}
    run_interleaved(lines, lambda text: None, "json.tool")
    return file.read_text()


def test_each_takes_a_step_there_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert letters(monkeypatch, tmp_path / "steps", a=3, b=5, c=3) == "abccbaabcbb"


class Steps:
    """Of which there are so many."""

    def __init__(self, count: int) -> None:
        self.left, self.ended = count, 0

    def take_turn(self) -> bool:
        self.left -= 1
        return self.left > 0

    def end(self) -> None:
        self.ended += 1


def test_turns_are_counted_until_none_goes_on() -> None:
    told: list[int] = []
    runs = [Steps(2), Steps(4)]
    interleave(runs, told.append)
    assert told == [1, 2, 3, 4]
    assert [run.ended for run in runs] == [1, 1]


def test_where_one_fails_the_others_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "steps"
    with pytest.raises(EngineError, match=r"`slipstream x 1 .*` ended with status 1"):
        letters(monkeypatch, file, x=1, a=100)
    assert file.read_text() == "xaa"


def test_one_that_is_killed_while_it_waits_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = interleaved_runs._RunProcess.take_turn

    def later(run: interleaved_runs._RunProcess) -> bool:
        ready = taken(run)
        if run.line[0] == "k":
            run.process.wait()
        return ready

    monkeypatch.setattr(interleaved_runs._RunProcess, "take_turn", later)
    with pytest.raises(EngineError, match=r"`slipstream k 3 .*` ended with status -9"):
        letters(monkeypatch, tmp_path / "steps", KILLED, k=3)
