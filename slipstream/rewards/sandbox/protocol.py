"""The seam of sandboxes: a program, what it may use, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Verdict = Literal["ok", "failed", "time", "memory", "output", "compile"]
"""Ended with status 0, ended with another or by a signal, stopped at a limit (of time, memory or
output), or did not compile."""


@dataclass(frozen=True, slots=True)
class Program:
    """Source text, and the language that it is in."""

    code: str
    language: str = "python"


@dataclass(frozen=True, slots=True)
class ProgramLimits:
    """What one run of a program may use.

    Seconds of wall-clock time; processor time of one process is limited by the same. After
    `total_timeout_s` no further run is begun. Memory is of all its processes together, output of
    both streams.
    """

    run_timeout_s: float = 5.0
    compile_timeout_s: float = 10.0
    total_timeout_s: float = 20.0
    memory_mb: int = 1024
    files_mb: int = 64
    output_kb: int = 1024
    processes: int = 16


DEFAULT_LIMITS = ProgramLimits()


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """What one run came to. `stdout` and `stderr` are what was written until then."""

    verdict: Verdict
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0


def in_time(stdins: Sequence[str], limits: ProgramLimits, began: float) -> Iterator[str]:
    """The first one, and those whose runs may begin before the total time is up, counted from
    `began` (`time.monotonic`): before a program is compiled."""
    deadline = began + limits.total_timeout_s
    for place, stdin in enumerate(stdins):
        if place and time.monotonic() >= deadline:
            return
        yield stdin


class SandboxError(RuntimeError):
    """A program could not be run, by no fault of its own: the sandbox is broken or away."""


class Sandbox(Protocol):
    """Runs programs that nobody vouches for."""

    at_once: int
    """How many programs may run at a time."""

    def knows(self, language: str) -> bool:
        """Whether it can run programs in a language. What is not known here is no program."""
        ...

    def run(self, program: Program, stdins: Sequence[str]) -> Iterator[ProgramResult]:
        """Run a program once for each standard input, in order; it is compiled once. There is
        nothing more after a verdict of "compile" and when the total time is up. May be called by
        several threads.

        Raises SandboxError where it could not be run, and RewardError where none can be: then the
        setting or the package that is missing is named.
        """
        ...
