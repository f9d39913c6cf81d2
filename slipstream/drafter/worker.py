"""Co-training in a separate process that uses idle CPU time.

    parent                                    worker: one thread, scheduled when a core is idle
      learn(entries, vocab, step)      ->     trains in slices until the rows are used up
      stop()                           ->     ends the slice after the current optimizer step
      results()                        <-     result of each slice, with weights to publish

The parent starts `python -m slipstream.drafter.worker_process FOLDER`. Commands and results are
lines of JSON over pipes. Tensors are passed as files in a private folder, so that neither process
waits for the other to read. The worker ends when its parent ends, and removes the folder.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import psutil
import torch
from torch import Tensor

from slipstream.drafter.buffer import BufferedSequence, BufferSettings, DraftBuffer
from slipstream.drafter.collector import CollectorSettings, FeatureCollector
from slipstream.drafter.cotraining import CoTraining, CoTrainSettings
from slipstream.drafter.sequences import VocabLayers
from slipstream.drafter.trainer import Metrics
from slipstream.drafter.worker_process import AWARE
from slipstream.errors import TrainingError
from slipstream.models.draft.model import DraftModel
from slipstream.types import PolicyVersion

_SETUP = "setup.pickle"
_READY = "ready"
_CLOSING_SECONDS = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """What a worker needs at its start.

    `weights` are those of the head in use, a model like `blank`; `version` is its number.
    `trained_to` is as in `CoTraining`. `start_stopped`: the worker pauses after its start until
    `set_running(True)`. The rest are settings of the training.
    """

    blank: DraftModel
    weights: Mapping[str, Tensor]
    version: int
    collector: CollectorSettings
    buffer: BufferSettings
    train: CoTrainSettings
    trained_to: PolicyVersion | None = None
    start_stopped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceResult:
    """The result of one slice (`cotraining.Slice`), sent to the parent.

    `weights` are those of a head to publish as `version`, or None if it was held back or nothing
    was trained. `trained_to` is as in `CoTraining`. `cpu_seconds` is the CPU time of the slice.
    """

    step: int
    metrics: Metrics
    version: int
    trained_to: PolicyVersion | None
    weights: Mapping[str, Tensor] | None
    held_back: bool
    failure: str | None
    cpu_seconds: float


class DraftWorker:
    """Starts a worker process and communicates with it; used in the parent."""

    def __init__(self, setup: WorkerSetup) -> None:
        """Start the process. Must be called on a thread that outlives this object: for Linux, the
        parent of the process ends when this thread ends."""
        self._folder = tempfile.TemporaryDirectory(prefix="slipstream-drafter-")
        self._path, self._numbers = Path(self._folder.name), itertools.count()
        self._lookback = setup.buffer.lookback_steps
        self._unread: dict[int, int] = {}
        """Number -> RL step of the row files that the worker may not have read yet."""
        _write(self._path / _SETUP, setup)
        # The child inherits the mask, so a SIGCONT during its start stays pending.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCONT})
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "slipstream.drafter.worker_process", str(self._path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # A new group, so that only the parent gets Ctrl-C. Not a new session: Linux divides
                # CPU time between sessions first (autogroup), and ignores SCHED_IDLE across them.
                process_group=0,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.set_blocking(self._in.fileno(), False)
        self._lines = _Lines(self._out.fileno())
        # The process must not be stopped before this file exists. Python starts in about 0.01 s.
        while not (self._path / AWARE).exists() and self._process.poll() is None:
            time.sleep(0.001)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def cpu_seconds(self) -> float:
        """CPU time of the process so far, in seconds; 0 if it has ended."""
        try:
            times = psutil.Process(self.pid).cpu_times()
        except psutil.Error:
            return 0.0
        return float(times.user + times.system)

    def wait_until_ready(self, seconds: float) -> bool:
        """Wait up to `seconds` until the process is set up. Returns False on timeout.

        Also returns True if the process has ended; the next call of another method raises then.
        """
        deadline = time.monotonic() + seconds
        while not (self._path / _READY).exists() and self._process.poll() is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def learn(self, entries: Sequence[BufferedSequence], vocab: VocabLayers, step: int) -> None:
        """Train on these responses of RL step `step`, and on those of earlier steps that are still
        buffered. `vocab` are the current policy's.

        Writes a file, so it must not be called on an event loop. Raises TrainingError if the
        process has ended.
        """
        self._withdraw_rows(step - self._lookback)
        number = next(self._numbers)
        self._unread[number] = step
        _write(_rows_file(self._path, number), (entries, vocab))
        # The command names all unread files, because a command can get lost (`_send`).
        self._send(op="learn", first=min(self._unread), last=number, step=step)

    def stop(self) -> None:
        """End the current slice after its current optimizer step, without waiting for it. Raises
        TrainingError if the process has ended."""
        self._send(op="stop")

    def set_running(self, running: bool) -> None:
        """Let the process run, or suspend it at once (SIGCONT, SIGSTOP)."""
        self._process.send_signal(signal.SIGCONT if running else signal.SIGSTOP)

    def results(self) -> list[SliceResult]:
        """The results since the last call. Raises TrainingError if the process has ended."""
        lines = list(self._lines.available())
        if self._lines.ended:
            raise self._ended()
        found = []
        for line in lines:
            file = self._path / line["file"]
            found.append(cast(SliceResult, _read(file)))
            file.unlink()
        return found

    def close(self) -> None:
        """End the process and remove its files."""
        with contextlib.suppress(OSError):
            self._in.close()
        self.set_running(True)
        try:
            self._process.wait(_CLOSING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._out.close()
        self._folder.cleanup()

    def _withdraw_rows(self, last_step: int) -> None:
        """Delete unread row files of steps up to `last_step`. Without this, files would accumulate
        if no core is ever idle."""
        for number, step in list(self._unread.items()):
            path = _rows_file(self._path, number)
            if step <= last_step:
                path.unlink(missing_ok=True)
            if not path.exists():
                del self._unread[number]

    @property
    def _in(self) -> Any:
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def _out(self) -> Any:
        assert self._process.stdout is not None
        return self._process.stdout

    def _send(self, **command: object) -> None:
        try:
            os.write(self._in.fileno(), json.dumps(command).encode() + b"\n")
        except BlockingIOError:
            # The pipe is full of unread commands. The next command names these rows again.
            return
        except OSError as error:
            raise self._ended() from error

    def _ended(self) -> TrainingError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSING_SECONDS)
        return TrainingError(
            f"the process that trains the draft head ended with status {self._process.returncode}"
        )


class _Lines:
    """Reads lines of JSON from a file descriptor without blocking."""

    def __init__(self, fd: int) -> None:
        self._fd, self._rest = fd, b""
        self.ended = False

    def ready(self, seconds: float | None = 0.0) -> bool:
        """Wait up to `seconds` (None: without limit). True if there is something to read or the
        other side has ended."""
        return self.ended or bool(select.select([self._fd], [], [], seconds)[0])

    def hung_up(self) -> bool:
        """Whether the other side has closed the pipe, even if there are unread lines."""
        poll = select.poll()
        poll.register(self._fd, select.POLLHUP)
        return bool(poll.poll(0))

    def available(self) -> Iterator[dict[str, Any]]:
        """Yield the complete lines that have arrived."""
        while not self.ended and self.ready():
            more = os.read(self._fd, 1 << 16)
            self.ended = not more
            *lines, self._rest = (self._rest + more).split(b"\n")
            yield from map(json.loads, lines)


def _rows_file(folder: Path, number: int) -> Path:
    return folder / f"rows-{number}.pickle"


def _write(path: Path, value: object) -> None:
    """Pickle `value` into a file for the other process, which reads it after the next line."""
    path.write_bytes(pickle.dumps(value))


def _read(path: Path) -> object:
    return pickle.loads(path.read_bytes())  # Safe: written by our own process.


def _take(path: Path) -> object | None:
    """Read and delete a file. Returns None if it does not exist (any more). The rename first makes
    sure that only one process takes it."""
    taken = path.with_suffix(".taken")
    try:
        path.rename(taken)
    except FileNotFoundError:
        return None
    value = _read(taken)
    taken.unlink()
    return value


def run_when_idle() -> None:
    """Run this thread only while a core is idle (SCHED_IDLE, else nice 19)."""
    if hasattr(os, "SCHED_IDLE"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            return
    os.nice(19)


def run_worker(folder: Path) -> None:
    """Run the worker until the parent ends."""
    torch.set_num_threads(1)
    # Redirect prints to stderr, because stdout carries the results.
    answer = os.dup(1)
    os.dup2(2, 1)
    _work(folder, _Lines(0), answer)
    # Usually the parent removes the folder, but it may have been killed.
    shutil.rmtree(folder, ignore_errors=True)


def _work(folder: Path, lines: _Lines, answer: int) -> None:
    setup = cast(WorkerSetup, _read(folder / _SETUP))
    training = _training(setup)
    (folder / _READY).touch()
    # Only now: the parent waits for the setup, which idle priority would delay.
    run_when_idle()
    if setup.start_stopped:
        # Wait for SIGCONT instead of SIGSTOP: a stopped process would stay forever if the parent
        # has already ended.
        while signal.sigtimedwait({signal.SIGCONT}, 1.0) is None:
            if lines.hung_up():
                return
    while lines.ready(None) and not lines.ended:
        # Obey the newest command only, but read the rows of all of them.
        command: dict[str, Any] | None = None
        vocab: VocabLayers | None = None
        for line in lines.available():
            command = line if line["op"] == "learn" else None
            if command is None:
                continue
            training.collector.buffer.drop_before(command["step"])
            for number in range(command["first"], command["last"] + 1):
                taken = _take(_rows_file(folder, number))
                if taken is not None:
                    entries, vocab = cast(tuple[list[BufferedSequence], VocabLayers], taken)
                    for entry in entries:
                        training.collector.keep(entry)
        if command is None or vocab is None:
            continue
        while not lines.ready():
            result = _slice(training, vocab, command["step"], lines)
            name = f"learned-{time.monotonic_ns()}.pickle"
            _write(folder / name, result)
            with contextlib.suppress(BrokenPipeError):
                os.write(answer, json.dumps({"file": name}).encode() + b"\n")
            if "drafter/loss" not in result.metrics:
                break  # All rows are used up.


def _training(setup: WorkerSetup) -> CoTraining:
    head = setup.blank.blank()
    collector = FeatureCollector(DraftBuffer(setup.buffer), setup.collector)
    training = CoTraining(head, collector, setup.train)
    training.start_from(setup.weights, setup.version, setup.trained_to)
    return training


def _slice(training: CoTraining, vocab: VocabLayers, step: int, lines: _Lines) -> SliceResult:
    started = time.process_time()
    done = training.slice(vocab, step=step, stop=lines.ready)
    return SliceResult(
        step=step,
        metrics=done.metrics,
        version=training.version,
        trained_to=training.trained_to,
        weights=dict(training.published()) if done.adopted else None,
        held_back=done.held_back,
        failure=done.failure,
        cpu_seconds=time.process_time() - started,
    )
