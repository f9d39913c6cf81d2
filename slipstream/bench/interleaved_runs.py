"""RL runs in turns of a step, each a process of its own.

A shared machine's speed changes within seconds by more than runs differ by, so one whole run after
the other says little. Here all runs are up at once, one of them takes a step, and then the next.
What a run waits for is where it logs a step's metrics, after that step's clock and before the next
one's. Used by `ab` and `trl`.
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

_LOGGER = "turns"

SETTINGS = (
    f"trainer.logger=[file,{_LOGGER}]",
    f"actor_rollout_ref.model.external_lib={__name__}",
)
"""Of such runs."""

_SOCKET = "SLIPSTREAM_TURNS_SOCKET"
"""Environment variable: the open socket to who says whose turn it is."""

_READY, _GO = b"r", b"g"

_BESIDE = "SLIPSTREAM_TURNS_BESIDE"
"""Environment variable: a module of the user's to import, too."""

_COMMAND = ("-m", "slipstream.cli")


class PacedLogger:
    """Logs nothing, and waits for the run's next turn."""

    def __init__(self, socket_number: int) -> None:
        self._socket = socket.socket(fileno=socket_number)
        self._wait()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """After a step."""
        self._wait()

    def close(self) -> None:
        """The other side sees that there is no next turn."""
        self._socket.close()

    def _wait(self) -> None:
        self._socket.sendall(_READY)
        if not self._socket.recv(1):
            # No error of a logger, which a run goes on without.
            raise SystemExit("nobody is left to say whose turn it is")


def _orders(context: LoggerContext) -> MetricsLogger:
    return PacedLogger(int(os.environ[_SOCKET]))


# In a run that takes turns; elsewhere there is no such logger.
if _SOCKET in os.environ:
    register_logger(_LOGGER)(_orders)
if _BESIDE in os.environ:
    importlib.import_module(os.environ[_BESIDE])


class Interleavable(Protocol):
    """A run that takes a step when it is told to."""

    def take_turn(self) -> bool:
        """A step; whether it waits for another turn."""
        ...

    def end(self) -> None:
        """Called once, after its last turn."""
        ...


def interleave(
    runs: Sequence[Interleavable], taken: Callable[[int], None] = lambda turns: None
) -> None:
    """A step of each, then the next one of each the other way round, until all have ended. `taken`
    is told how many turns each has had that goes on."""
    for turns in itertools.count(1):
        if not runs:
            return
        left = [run for run in runs if run.take_turn()]
        for run in runs:
            if run not in left:
                run.end()
        runs = left[::-1]
        taken(turns)


@dataclass(slots=True)
class _RunProcess:
    process: subprocess.Popen[bytes]
    socket: socket.socket
    line: Sequence[str]
    output: Path
    say: Callable[[str], None]

    def until_ready(self) -> bool:
        """Whether it waits for a turn; False once it has ended."""
        return self.socket.recv(1) == _READY

    def take_turn(self) -> bool:
        """See `Interleavable`."""
        try:
            self.socket.sendall(_GO)
        except BrokenPipeError:
            # Killed while it waited.
            return False
        return self.until_ready()

    def end(self) -> None:
        """Raises EngineError where the run has failed."""
        if self.process.wait():
            output = self.output.read_text(encoding="utf-8", errors="replace")
            say_failed(["slipstream", *self.line], self.process.returncode, output, self.say)


def run_interleaved(
    lines: Mapping[str, Sequence[str]], say: Callable[[str], None], external_lib: str | None = None
) -> None:
    """Run commands of RL as `begun` begins them, in turns (`interleave`). Raises EngineError where
    one fails, and stops the others."""
    with begun(lines, say, external_lib) as runs:
        interleave(list(runs.values()))


@contextmanager
def begun(
    lines: Mapping[str, Sequence[str]], say: Callable[[str], None], external_lib: str | None = None
) -> Iterator[dict[str, Interleavable]]:
    """Runs of RL by name, each waiting for its first turn: arguments of `slipstream` with
    `SETTINGS`. `external_lib`: what they import besides. Those that run at the body's end are
    stopped. Raises EngineError where one fails at once."""
    with TemporaryDirectory() as folder, ExitStack() as stack:
        runs = dict[str, Interleavable]()
        # One after the other: what starts beside another is slower, and that is no step's time.
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
    beside = {} if external_lib is None else {_BESIDE: external_lib}
    with theirs, output.open("wb") as written:
        process = subprocess.Popen(
            [sys.executable, *_COMMAND, *line],
            stdout=written,
            stderr=subprocess.STDOUT,
            env={**os.environ, **beside, _SOCKET: str(theirs.fileno())},
            pass_fds=[theirs.fileno()],
        )
    return _RunProcess(process, ours, line, output, say)


def _stop(run: _RunProcess) -> None:
    run.socket.close()
    run.process.kill()
    run.process.wait()
