"""Ctrl-C: the first ends the run after its step with a checkpoint, the second ends it at once."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

from slipstream.checkpoint.manager import CheckpointManager
from slipstream.metrics.loggers import read_jsonl
from tests.run.conftest import Whole
from tests.run.helpers import assert_same_result, finish, result_of, start
from tests.run.killing import line_of


def interrupt_after(process: BaseProcess, log: Path, steps: int) -> None:
    """Send SIGINT once `log` has the metrics of `steps` steps."""
    assert process.pid is not None
    while process.is_alive() and (not log.exists() or log.read_text().count("\n") < steps):
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGINT)


def latest_step(root: Path) -> int:
    return CheckpointManager(root, keep=None).steps()[-1]


def test_run_interrupted_in_each_phase_equals_uninterrupted_run(
    whole: Whole, tmp_path: Path
) -> None:
    run, output = tmp_path / "run", tmp_path / "output.txt"
    # Only the interruption saves checkpoints.
    line = [*line_of(run, whole.reward), "sft.save_freq=-1", "trainer.save_freq=-1"]
    process = start(line, output)
    interrupt_after(process, run / "sft" / "metrics.jsonl", 2)
    assert finish(process, output) == 130
    stopped_at = latest_step(run / "sft")
    assert 2 <= stopped_at < 6
    assert read_jsonl(run / "sft" / "metrics.jsonl")[-1][0] == stopped_at
    assert not (run / "metrics.jsonl").exists()

    process = start(line, output)
    interrupt_after(process, run / "metrics.jsonl", 3)
    assert finish(process, output) == 130
    assert latest_step(run / "sft") == 6
    stopped_at = latest_step(run)
    assert 2 <= stopped_at < 6

    process = start(line, output)
    interrupt_after(process, run / "metrics.jsonl", 1 + stopped_at + 1)
    assert process.pid is not None
    time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)
    assert finish(process, output) == 130

    assert finish(start(line, output), output) == 0
    text = output.read_text(encoding="utf-8")
    assert text.count("finishing the current step, then saving a checkpoint") == 3
    assert "Traceback" not in text
    result = result_of(run)
    assert_same_result(result, whole.result)
