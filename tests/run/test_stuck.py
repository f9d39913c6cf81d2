"""A process ends with the reason even if one of its threads never returns."""

from __future__ import annotations

import functools
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from slipstream.deadlines import frozen_interpreter_ends
from tests.run.helpers import finish, rl_only


def _child(line: list[str], output: str, stuck: str, ready: str) -> None:
    """Run the command line with one part that hangs in a thread."""
    with open(output, "a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    from slipstream.cli import main
    from slipstream.deadlines import Deadlines
    from slipstream.inference.engine.engine import Engine
    from slipstream.run import train as run_train
    from slipstream.training.single import SingleProcessBackend

    def hang(*arguments: object, **more: object) -> None:
        Path(ready).touch()
        threading.Event().wait()

    if stuck == "engine":
        Engine.step = hang  # type: ignore[method-assign, assignment]
    elif stuck == "trainer":
        SingleProcessBackend._forward_backward = hang  # type: ignore[method-assign, assignment]
    else:
        SingleProcessBackend.save_policy = hang  # type: ignore[method-assign]
    vars(run_train)["Deadlines"] = functools.partial(Deadlines, grace_s=0.3)
    run_train.FORCED_EXIT_SECONDS = 0.3
    sys.exit(main(line))


def start_stuck(folder: Path, stuck: str, seconds: float) -> tuple[BaseProcess, Path]:
    line = rl_only(folder / "run", f"trainer.stage_timeout_s={seconds}", "trainer.logger=[file]")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.run.preload"])
    output = folder / "output.txt"
    arguments = (line, str(output), stuck, str(folder / "ready"))
    process = context.Process(target=_child, args=arguments)
    process.start()
    return process, output


@pytest.mark.parametrize(
    ("stuck", "message"),
    [
        ("engine", "rollout: a thread of the inference engine does not return"),
        ("trainer", "update: the trainer's optimizer step was not done after 0.7 s"),
        ("disk", "checkpoint: writing it to disk was not done after 0.7 s"),
    ],
)
def test_part_that_hangs_ends_the_run_and_is_named(
    tmp_path: Path, stuck: str, message: str
) -> None:
    process, output = start_stuck(tmp_path, stuck, 0.7)
    assert finish(process, output, timeout=60) == 8
    text = output.read_text(encoding="utf-8")
    assert f"error: {message}" in text
    assert "Traceback" not in text


def test_second_ctrl_c_ends_a_run_that_cannot_be_cancelled(tmp_path: Path) -> None:
    process, output = start_stuck(tmp_path, "trainer", 1000)
    assert process.pid is not None
    while not (tmp_path / "ready").exists() and process.is_alive():
        time.sleep(0.005)
    for _ in range(2):
        os.kill(process.pid, signal.SIGINT)
        time.sleep(0.1)
    assert finish(process, output, timeout=60) == 130
    assert output.read_text(encoding="utf-8").rstrip().endswith("interrupted")


def _backtrack(output: str) -> None:
    with open(output, "a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 2)
    from slipstream.deadlines import frozen_interpreter_ends

    with frozen_interpreter_ends(0.5):
        # Never releases the interpreter, so no Python timer can fire.
        re.match(r"(a+)+$", "a" * 60 + "b")


def test_call_that_blocks_the_interpreter_ends_the_process_with_its_traceback(
    tmp_path: Path,
) -> None:
    output = tmp_path / "output.txt"
    process = multiprocessing.get_context("spawn").Process(target=_backtrack, args=(str(output),))
    process.start()
    process.join(60)
    assert process.exitcode == 1
    text = output.read_text()
    assert "Timeout" in text
    assert "_backtrack" in text


def test_interpreter_that_runs_is_not_ended() -> None:
    with frozen_interpreter_ends(0.3):
        time.sleep(0.9)
