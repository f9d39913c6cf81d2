"""Co-training in a process of its own, in processor time that nobody else wants.

    parent                                    worker: one thread, scheduled when a core is idle
      learn(rows, ends, step)          ->     slices of training, while there is something to learn
      stop()                           ->     the slice ends after the optimizer step under way
      results()                        <-     what each slice came to, with weights to publish

Lines of JSON say what is to be done and what was; tensors lie in files of a folder that only the
two know, so that neither waits for the other to read. The worker ends when its parent does, and
removes the folder. `python -m slipstream.drafter.worker_process FOLDER` is what the parent starts.
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
from slipstream.drafter.sequences import PolicyEnds
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
    """What a worker begins with: the head in use (`weights`, of a head like `blank`) as `version`,
    `trained_to` a version of the policy (see `CoTraining`), and how it is to learn. With
    `stands_still` it stops, once it has begun, until it is told to `go_on`."""

    blank: DraftModel
    weights: Mapping[str, Tensor]
    version: int
    collector: CollectorSettings
    buffer: BufferSettings
    train: CoTrainSettings
    trained_to: PolicyVersion | None = None
    stands_still: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What a slice came to (`cotraining.Slice`): `weights` of a head to publish as `version`, None
    where it is held back or nothing was learned; `trained_to` as in `WorkerSetup`; `cpu_seconds`
    that the slice took."""

    step: int
    metrics: Metrics
    version: int
    trained_to: PolicyVersion | None
    weights: Mapping[str, Tensor] | None
    held_back: bool
    failure: str | None
    cpu_seconds: float


class DraftWorker:
    """The parent's end of a worker process."""

    def __init__(self, setup: WorkerSetup) -> None:
        """Starts the process; it answers when it has read what it begins with. To be made on a
        thread that lives as long as this: Linux takes the end of that thread for the parent's."""
        self._folder = tempfile.TemporaryDirectory(prefix="slipstream-drafter-")
        self._path, self._numbers = Path(self._folder.name), itertools.count()
        self._lookback = setup.buffer.lookback_steps
        self._unread: dict[int, int] = {}
        """Numbers of the files of rows that may still be there, and their steps."""
        _write(self._path / _SETUP, setup)
        # Blocked in the child from the beginning: one that comes while it begins is kept for it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCONT})
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "slipstream.drafter.worker_process", str(self._path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # A Ctrl-C is the parent's to handle. Not a session of its own: Linux shares cores
                # out among sessions first (autogroup), whatever the classes of their threads.
                process_group=0,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.set_blocking(self._in.fileno(), False)
        self._lines = _Lines(self._out.fileno())
        # It must not be stopped before. Python starts in hundredths of a second.
        while not (self._path / AWARE).exists() and self._process.poll() is None:
            time.sleep(0.001)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def cpu_seconds(self) -> float:
        """What the process has computed so far; 0 where it has ended."""
        try:
            times = psutil.Process(self.pid).cpu_times()
        except psutil.Error:
            return 0.0
        return float(times.user + times.system)

    def wait_until_ready(self, seconds: float) -> bool:
        """Until it has begun, which takes seconds and memory traffic, or has ended, which whoever
        speaks to it next is told. Whether that was so within so many seconds."""
        late = time.monotonic() + seconds
        while not (self._path / _READY).exists() and self._process.poll() is None:
            if time.monotonic() > late:
                return False
            time.sleep(0.01)
        return True

    def learn(self, kept: Sequence[BufferedSequence], ends: PolicyEnds, step: int) -> None:
        """Train on these rows of RL step `step` and on those of the steps before, between the ends
        of the policy as it is now. Writes a file: not for an event loop. Raises TrainingError where
        the process has ended."""
        self._take_back(step - self._lookback)
        number = next(self._numbers)
        self._unread[number] = step
        _write(_rows_file(self._path, number), (kept, ends))
        # All that is unread, for orders may get lost: see `_say`.
        self._say(op="learn", first=min(self._unread), last=number, step=step)

    def stop(self) -> None:
        """End the slice under way after its present optimizer step. Does not wait for it. Raises
        TrainingError where the process has ended."""
        self._say(op="stop")

    def go_on(self, wanted: bool) -> None:
        """Let the process compute, or have it stand still where it is, at once."""
        self._process.send_signal(signal.SIGCONT if wanted else signal.SIGSTOP)

    def results(self) -> list[Learned]:
        """What has come since the last call. Raises TrainingError where the process has ended."""
        lines = list(self._lines.waiting())
        if self._lines.ended:
            raise self._gone()
        found = []
        for line in lines:
            file = self._path / line["file"]
            found.append(cast(Learned, _read(file)))
            file.unlink()
        return found

    def close(self) -> None:
        """End the process, and remove its files."""
        with contextlib.suppress(OSError):
            self._in.close()
        self.go_on(True)
        try:
            self._process.wait(_CLOSING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._out.close()
        self._folder.cleanup()

    def _take_back(self, last_step: int) -> None:
        """Rows up to those of `last_step` that the worker has had no time to read: files would pile
        up where no core is ever idle."""
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

    def _say(self, **words: object) -> None:
        try:
            os.write(self._in.fileno(), json.dumps(words).encode() + b"\n")
        except BlockingIOError:
            # Full of orders that it has had no time to read; the next one names these rows, too.
            return
        except OSError as error:
            raise self._gone() from error

    def _gone(self) -> TrainingError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSING_SECONDS)
        return TrainingError(
            f"the process that trains the draft head ended with status {self._process.returncode}"
        )


class _Lines:
    """Lines of JSON from a file descriptor, without waiting for more than is there."""

    def __init__(self, fd: int) -> None:
        self._fd, self._rest = fd, b""
        self.ended = False

    def ready(self, seconds: float | None = 0.0) -> bool:
        """Whether there is something to read, or the other side has ended, within `seconds` (None:
        however long it takes)."""
        return self.ended or bool(select.select([self._fd], [], [], seconds)[0])

    def ended_meanwhile(self) -> bool:
        """Whether the other side has ended, though nothing that it said has been read."""
        poll = select.poll()
        poll.register(self._fd, select.POLLHUP)
        return bool(poll.poll(0))

    def waiting(self) -> Iterator[dict[str, Any]]:
        """The whole lines that are there."""
        while not self.ended and self.ready():
            more = os.read(self._fd, 1 << 16)
            self.ended = not more
            *lines, self._rest = (self._rest + more).split(b"\n")
            yield from map(json.loads, lines)


def _rows_file(folder: Path, number: int) -> Path:
    return folder / f"rows-{number}.pickle"


def _write(path: Path, value: object) -> None:
    """For the other side alone, which looks once it is told."""
    path.write_bytes(pickle.dumps(value))


def _read(path: Path) -> object:
    return pickle.loads(path.read_bytes())  # our own process wrote it


def _take(path: Path) -> object | None:
    """What is in a file, which is then nobody else's; None where there is no such file (any
    more)."""
    taken = path.with_suffix(".taken")
    try:
        path.rename(taken)
    except FileNotFoundError:
        return None
    value = _read(taken)
    taken.unlink()
    return value


def run_when_idle() -> None:
    """From here on this thread runs only while a core has nothing else to do."""
    if hasattr(os, "SCHED_IDLE"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            return
    os.nice(19)


def run_worker(folder: Path) -> None:
    """The worker: until the other side ends."""
    torch.set_num_threads(1)
    # Whatever prints must not be taken for an answer.
    answer = os.dup(1)
    os.dup2(2, 1)
    _work(folder, _Lines(0), answer)
    # The parent would do it, where it is there to.
    shutil.rmtree(folder, ignore_errors=True)


def _work(folder: Path, lines: _Lines, answer: int) -> None:
    setup = cast(WorkerSetup, _read(folder / _SETUP))
    training = _training(setup)
    (folder / _READY).touch()
    # Not before: the parent waits for this.
    run_when_idle()
    if setup.stands_still:
        # Not by stopping itself, for which nobody would be there if the parent has ended since.
        while signal.sigtimedwait({signal.SIGCONT}, 1.0) is None:
            if lines.ended_meanwhile():
                return
    while lines.ready(None) and not lines.ended:
        # Of several orders the newest one counts, and the rows of all that were not taken back.
        order: dict[str, Any] | None = None
        ends: PolicyEnds | None = None
        for line in lines.waiting():
            order = line if line["op"] == "learn" else None
            if order is None:
                continue
            training.collector.buffer.forget_before(order["step"])
            for number in range(order["first"], order["last"] + 1):
                taken = _take(_rows_file(folder, number))
                if taken is not None:
                    kept, ends = cast(tuple[list[BufferedSequence], PolicyEnds], taken)
                    for one in kept:
                        training.collector.keep(one)
        if order is None or ends is None:
            continue
        while not lines.ready():
            learned = _slice(training, ends, order["step"], lines)
            name = f"learned-{time.monotonic_ns()}.pickle"
            _write(folder / name, learned)
            with contextlib.suppress(BrokenPipeError):
                os.write(answer, json.dumps({"file": name}).encode() + b"\n")
            if "drafter/loss" not in learned.metrics:
                break  # Nothing is left to learn from.


def _training(setup: WorkerSetup) -> CoTraining:
    head = setup.blank.blank()
    collector = FeatureCollector(DraftBuffer(setup.buffer), setup.collector)
    training = CoTraining(head, collector, setup.train)
    training.begin_with(setup.weights, setup.version, setup.trained_to)
    return training


def _slice(training: CoTraining, ends: PolicyEnds, step: int, lines: _Lines) -> Learned:
    started = time.process_time()
    done = training.slice(ends, step=step, stop=lines.ready)
    return Learned(
        step=step,
        metrics=done.metrics,
        version=training.version,
        trained_to=training.trained_to,
        weights=dict(training.published()) if done.adopted else None,
        held_back=done.held_back,
        failure=done.failure,
        cpu_seconds=time.process_time() - started,
    )
