"""Interleaved RL runs: each is a separate process, and they take one step at a time, in turn.

The speed of a shared machine drifts within seconds by more than runs differ, so comparing whole
runs one after another says little. Here all runs are started, and only one of them computes at a
time. A run waits in its metrics logger, after the clock of a step has stopped and before the next
one's has started. Used by `ab` and by `bench/trl_runs.py`.
"""

from __future__ import annotations

import importlib
import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from slipstream.bench.rl_line import say_failed
from slipstream.metrics.loggers import LoggerContext, MetricsLogger, register_logger

_LOGGER = "interleaved"

SETTINGS = (
    f"trainer.logger=[file,{_LOGGER}]",
    f"actor_rollout_ref.model.external_lib={__name__}",
)
"""Settings of runs that are interleaved."""

_SOCKET = "SLIPSTREAM_INTERLEAVED_SOCKET"
"""Environment variable: number of the open socket to the benchmark, which tells a run to step."""

_READY, _GO = b"r", b"g"

_USER_MODULE = "SLIPSTREAM_INTERLEAVED_MODULE"
"""Environment variable: a user's module to import, because `SETTINGS` replaces `external_lib`."""

_COMMAND = ("-m", "slipstream.cli")


class PacedLogger:
    """Logs nothing; waits until the run may take its next step."""

    def __init__(self, socket_number: int) -> None:
        self._socket = socket.socket(fileno=socket_number)
        self._wait()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called after a step; waits until the next step may start."""
        self._wait()

    def close(self) -> None:
        """Close the socket, which tells the benchmark that the run has ended."""
        self._socket.close()

    def _wait(self) -> None:
        self._socket.sendall(_READY)
        if not self._socket.recv(1):
            # SystemExit, because a run continues after an ordinary error of a logger.
            raise SystemExit("the benchmark that interleaves this run has ended")


def _make_logger(context: LoggerContext) -> MetricsLogger:
    return PacedLogger(int(os.environ[_SOCKET]))


# Only in interleaved runs; other processes must not have this logger.
if _SOCKET in os.environ:
    register_logger(_LOGGER)(_make_logger)
if _USER_MODULE in os.environ:
    importlib.import_module(os.environ[_USER_MODULE])


class Interleavable(Protocol):
    """A run that takes a step when it is told to do so."""

    def take_step(self) -> bool:
        """Take a step. Returns whether the run waits for another one."""
        ...

    def end(self) -> None:
        """Called once, after the last step."""
        ...


def interleave(
    runs: Sequence[Interleavable], after_round: Callable[[int], None] = lambda rounds: None
) -> None:
    """Let each run take a step, then each again in reverse order, until all have ended.

    `after_round` gets the number of steps that each remaining run has taken.
    """
    for rounds in itertools.count(1):
        if not runs:
            return
        left = [run for run in runs if run.take_step()]
        for run in runs:
            if run not in left:
                run.end()
        runs = left[::-1]
        after_round(rounds)


@dataclass(slots=True)
class _RunProcess:
    process: subprocess.Popen[bytes]
    socket: socket.socket
    line: Sequence[str]
    output: Path
    say: Callable[[str], None]

    def until_ready(self) -> bool:
        """Wait until the run is ready for a step. Returns False if it has ended instead."""
        return self.socket.recv(1) == _READY

    def take_step(self) -> bool:
        """Let the process take a step. Returns whether it waits for another one."""
        try:
            self.socket.sendall(_GO)
        except BrokenPipeError:
            # The process was killed while it waited.
            return False
        return self.until_ready()

    def end(self) -> None:
        """Wait for the process. Raises EngineError if the run failed."""
        if self.process.wait():
            output = self.output.read_text(encoding="utf-8", errors="replace")
            say_failed(["slipstream", *self.line], self.process.returncode, output, self.say)


def run_interleaved(
    lines: Mapping[str, Sequence[str]], say: Callable[[str], None], external_lib: str | None = None
) -> None:
    """Start RL runs (`started_runs`) and interleave their steps until all have ended.

    Raises EngineError if one fails, and stops the others.
    """
    with started_runs(lines, say, external_lib) as runs:
        interleave(list(runs.values()))


@contextmanager
def started_runs(
    lines: Mapping[str, Sequence[str]], say: Callable[[str], None], external_lib: str | None = None
) -> Iterator[dict[str, Interleavable]]:
    """RL runs by name, each waiting for its first step.

    `lines` are arguments of `slipstream` that include `SETTINGS`. The runs also import the module
    `external_lib`. Runs that have not ended when the context is left are stopped. Raises
    EngineError if a run fails before its first step.
    """
    with TemporaryDirectory() as folder, ExitStack() as stack:
        runs = dict[str, Interleavable]()
        # One after another: starts at the same time would only slow each other down.
        for name, line in lines.items():
            run = _start(line, Path(folder) / name, external_lib, say)
            stack.callback(_stop, run)
            if run.until_ready():
                runs[name] = run
            else:
                run.end()
        yield runs


def _start(
    line: Sequence[str], output: Path, external_lib: str | None, say: Callable[[str], None]
) -> _RunProcess:
    ours, theirs = socket.socketpair()
    user_module = {} if external_lib is None else {_USER_MODULE: external_lib}
    with theirs, output.open("wb") as written:
        process = subprocess.Popen(
            [sys.executable, *_COMMAND, *line],
            stdout=written,
            stderr=subprocess.STDOUT,
            env={**os.environ, **user_module, _SOCKET: str(theirs.fileno())},
            pass_fds=[theirs.fileno()],
        )
    return _RunProcess(process, ours, line, output, say)


def _stop(run: _RunProcess) -> None:
    run.socket.close()
    run.process.kill()
    run.process.wait()
