"""The worker process of opportunistic training: training, stopping, suspending and ending."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipstream.drafter.buffer import BufferedSequence, BufferSettings, DraftBuffer
from slipstream.drafter.collector import CollectorSettings, FeatureCollector
from slipstream.drafter.cotraining import CoTrainSettings
from slipstream.drafter.trainer import DraftTrainSettings
from slipstream.drafter.worker import DraftWorker, SliceResult, WorkerSetup
from slipstream.errors import TrainingError
from slipstream.metrics.names import check_names
from slipstream.training.optim import OptimSettings
from slipstream.types import SamplingParams
from tests.drafter.helpers import (
    adopting_orphans,
    new_head,
    requests,
    responses,
    vocab_of,
    wait_for_end,
)
from tests.inference.helpers import shared_decoder

TIMEOUT = 120.0
COLLECTOR = CollectorSettings(
    params=SamplingParams(max_tokens=24), max_length=64, held_out=24, held_out_every=3
)


@pytest.fixture
def setup() -> WorkerSetup:
    head = new_head(shared_decoder())
    torch.nn.init.zeros_(head.fc.weight)
    return WorkerSetup(
        blank=head.blank(),
        weights={name: p.detach().clone() for name, p in head.named_parameters()},
        version=4,
        collector=COLLECTOR,
        buffer=BufferSettings(max_uses=3),
        train=CoTrainSettings(
            train=DraftTrainSettings(optim=OptimSettings(lr=1e-2)),
            updates=4,
            batch_size=8,
            accept_depth=2,
            ema_decay=0.0,
        ),
    )


@pytest.fixture
def worker(setup: WorkerSetup) -> Iterator[DraftWorker]:
    made = DraftWorker(setup)
    yield made
    made.close()


def rows(count: int = 64) -> list[BufferedSequence]:
    found = responses(shared_decoder(), requests(count))
    return [
        BufferedSequence(sequence=r.sequence, key=r.key, step=1) for r in found if r.sequence.slots
    ]


def until(worker: DraftWorker, done: Callable[[list[SliceResult]], bool]) -> list[SliceResult]:
    found: list[SliceResult] = []
    deadline = time.monotonic() + TIMEOUT
    while not done(found):
        assert time.monotonic() < deadline, "the worker does not answer"
        time.sleep(0.01)
        found += worker.results()
    return found


def test_worker_trains_until_the_rows_are_used_up(worker: DraftWorker) -> None:
    worker.learn(rows(), vocab_of(shared_decoder()), step=1)
    found = until(worker, lambda seen: any("drafter/loss" not in one.metrics for one in seen))
    adopted = [one for one in found if one.weights is not None]
    assert [one.version for one in adopted] == list(range(5, 5 + len(adopted)))
    assert adopted
    first, last = adopted[0], found[-1]
    assert first.weights is not None
    assert bool(first.weights["fc.weight"].any())
    before, after = (first.metrics[f"drafter/accept_length/{when}"] for when in ("before", "after"))
    assert after >= before
    # Three uses of each row that is not held out, in batches of eight at most.
    assert last.metrics["drafter/updates"] >= 3 * last.metrics["drafter/buffer_samples"] / 8
    for one in found:
        check_names(one.metrics)
        assert one.step == 1
        assert one.cpu_seconds > 0
    assert worker.results() == []


def test_stopped_slice_ends_early(worker: DraftWorker) -> None:
    # The stop command arrives before the first optimizer step ends.
    worker.learn(rows(), vocab_of(shared_decoder()), step=1)
    worker.stop()
    worker.learn(rows(8), vocab_of(shared_decoder()), step=2)
    found = until(worker, lambda seen: any("drafter/loss" not in one.metrics for one in seen))
    # It continued with the new rows and with the buffered ones.
    assert found[-1].step == 2
    assert found[-1].metrics["drafter/buffer_samples"] > 8


def test_unread_row_files_do_not_accumulate(worker: DraftWorker) -> None:
    os.kill(worker.pid, signal.SIGSTOP)
    entries = rows(24)
    for step in (1, 2, 3):
        part = [replace(one, step=step) for one in entries[step::3]]
        worker.learn(part, vocab_of(shared_decoder()), step)
    assert {path.name for path in worker._path.glob("rows-*")} == {"rows-1.pickle", "rows-2.pickle"}
    os.kill(worker.pid, signal.SIGCONT)
    found = until(worker, lambda seen: any("drafter/loss" not in one.metrics for one in seen))
    # The rows of the last two steps (lookback_steps=2).
    expected = [one for step in (2, 3) for one in entries[step::3]]
    collector = FeatureCollector(DraftBuffer(BufferSettings()), COLLECTOR)
    for one in expected:
        collector.keep(one)
    assert found[-1].metrics["drafter/buffer_samples"] == len(collector.buffer)
    assert list(worker._path.glob("rows-*")) == []


def test_killed_worker_is_reported(worker: DraftWorker) -> None:
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(TrainingError, match="trains the draft head ended with status -9"):
        until(worker, lambda _: False)
    with pytest.raises(TrainingError, match="ended with status -9"):
        worker.stop()


def _state(pid: int) -> str:
    """State of a process in Linux's letters: T is stopped, S is sleeping."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def _wait_for(state: str, pid: int) -> None:
    _wait(lambda: _state(pid) == state)


def _wait(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_suspended_worker_waits_until_set_running(
    setup: WorkerSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The test is about how the process ends, not how fast.
    monkeypatch.setattr("slipstream.drafter.worker._CLOSING_SECONDS", TIMEOUT)
    worker = DraftWorker(replace(setup, start_stopped=True))
    try:
        worker.learn(rows(), vocab_of(shared_decoder()), step=1)
        worker.wait_until_ready(60)
        assert (worker._path / "ready").exists()
        assert worker.results() == []
        assert list(worker._path.glob("rows-*"))
        worker.set_running(True)
        until(worker, lambda seen: bool(seen))
        # Suspends at once, at any point of its work.
        worker.set_running(False)
        _wait_for("T", worker.pid)
        worker.set_running(True)
        until(worker, lambda seen: any("drafter/loss" not in one.metrics for one in seen))
        worker.set_running(False)
    finally:
        worker.close()
    assert worker._process.returncode == 0


def test_early_set_running_is_not_lost(setup: WorkerSetup) -> None:
    worker = DraftWorker(replace(setup, start_stopped=True))
    try:
        worker.set_running(True)
        worker.learn(rows(8), vocab_of(shared_decoder()), step=1)
        until(worker, lambda seen: bool(seen))
    finally:
        worker.close()


def test_full_command_pipe_does_not_block_the_run(worker: DraftWorker) -> None:
    worker.set_running(False)
    # More than fits into a pipe.
    for _ in range(10_000):
        worker.stop()
    worker.set_running(True)
    # Commands that do not fit are lost; a later command names their rows.
    deadline, step = time.monotonic() + TIMEOUT, 1
    while not any("drafter/loss" in one.metrics for one in worker.results()):
        assert time.monotonic() < deadline
        worker.learn(rows(8), vocab_of(shared_decoder()), step=step)
        time.sleep(0.2)
        step += 1


ORPHANED = """
import pickle, signal, sys, time
from slipstream.drafter.worker import DraftWorker
worker = DraftWorker(pickle.loads(sys.stdin.buffer.read()))
while sys.argv[1] == "T" and not (worker._path / "ready").exists():
    time.sleep(0.01)
if sys.argv[1] == "T":
    worker.set_running(False)
print(worker.pid, worker._path, flush=True)
signal.pause()
"""


@pytest.mark.parametrize("state", ["T", "S"])
def test_suspended_worker_does_not_outlive_its_parent(setup: WorkerSetup, state: str) -> None:
    """T: suspended by SIGSTOP. S: still waiting for its first `set_running`."""
    with (
        adopting_orphans(),
        subprocess.Popen(
            [sys.executable, "-c", ORPHANED, state], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as parent,
    ):
        assert parent.stdin is not None
        assert parent.stdout is not None
        parent.stdin.write(pickle.dumps(replace(setup, start_stopped=True)))
        parent.stdin.close()
        number, folder = parent.stdout.readline().decode().split()
        pid = int(number)
        if state == "T":
            _wait_for("T", pid)
        parent.kill()
        parent.wait()
        wait_for_end(pid)
    assert not Path(folder).exists()


def test_close_ends_the_worker_and_removes_its_folder(worker: DraftWorker) -> None:
    worker.learn(rows(8), vocab_of(shared_decoder()), step=1)
    folder = worker._path
    worker.close()
    assert worker._process.returncode is not None
    assert not folder.exists()


def test_worker_has_idle_priority(worker: DraftWorker) -> None:
    worker.learn(rows(8), vocab_of(shared_decoder()), step=1)
    until(worker, lambda seen: bool(seen))
    assert os.sched_getscheduler(worker.pid) == os.SCHED_IDLE
