"""RL with real vLLM servers, whose processes are killed (`make peers`, `make test-peers`)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from slipstream.metrics.loggers import read_jsonl
from tests.inference.servers.real import PYTHON
from tests.run.helpers import ROLLOUT, rl_only

STEPS = 12

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs vLLM: make peers"),
]


def start(folder: Path, *overrides: str) -> subprocess.Popen[bytes]:
    """Start an RL run with vLLM in `folder`."""
    line = rl_only(
        folder,
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=2",
        "actor_rollout_ref.model.init.hidden_size=64",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        f"{ROLLOUT}.name=vllm",
        f"{ROLLOUT}.server.python={PYTHON}",
        "speculative.enable=false",
        *overrides,
    )
    with (folder.parent / "output.txt").open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "slipstream.cli", *line], stdout=output, stderr=output
        )


def steps(folder: Path) -> list[int]:
    path = folder / "metrics.jsonl"
    return [step for step, _ in read_jsonl(path)] if path.exists() else []


def until(condition: Callable[[], bool], run: subprocess.Popen[bytes], output: Path) -> None:
    end = time.monotonic() + 300
    while not condition():
        text = output.read_text() if output.exists() else ""
        assert run.poll() is None, text
        assert time.monotonic() < end, text
        time.sleep(0.2)


def servers(run: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """All processes below a run's guards, the API server first."""
    below = psutil.Process(run.pid).children(recursive=True)
    return [p for p in below if any("vllm" in part for part in p.cmdline()) or "VLLM" in p.name()]


def test_a_run_goes_on_after_its_server_was_killed(tmp_path: Path) -> None:
    folder, output = tmp_path / "run", tmp_path / "output.txt"
    run = start(folder)
    until(lambda: len(steps(folder)) >= 3, run, output)
    for process in servers(run):
        if "guard.py" not in " ".join(process.cmdline()):
            process.send_signal(signal.SIGKILL)
    assert run.wait(300) == 0, output.read_text()
    assert steps(folder) == [*range(1, STEPS + 1)]
    assert "its requests are begun again" in output.read_text() or "started again" in (
        output.read_text()
    )
    print(f"killed after step 3; steps {steps(folder)}")


def test_a_run_that_was_killed_leaves_no_process_and_resumes(tmp_path: Path) -> None:
    folder, output = tmp_path / "run", tmp_path / "output.txt"
    run = start(folder)
    until(lambda: len(steps(folder)) >= 5, run, output)
    found = servers(run)
    shared = [p for p in Path("/dev/shm").glob("slipstream-*")]
    assert len(found) >= 3
    assert len(shared) >= 1
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    _, alive = psutil.wait_procs(found, timeout=30)
    assert alive == []
    assert [p for p in shared if p.exists()] == []
    again = start(folder)
    assert again.wait(300) == 0, output.read_text()
    assert steps(folder) == [*range(1, STEPS + 1)]
    print(f"{len(found)} processes ended with the run; steps {steps(folder)}")


def test_two_servers_share_the_samples(tmp_path: Path) -> None:
    folder, output = tmp_path / "run", tmp_path / "output.txt"
    run = start(folder, f"{ROLLOUT}.server.replicas=2", "trainer.total_training_steps=3")
    assert run.wait(300) == 0, output.read_text()
    assert steps(folder) == [1, 2, 3]
    assert len(list((folder / "servers").glob("vllm-*.log"))) == 2
    last = read_jsonl(folder / "metrics.jsonl")[-1][1]
    assert last["training/rollout_probs_diff_max"] < 1e-3
