"""The interface of sandboxes: programs, their limits, and their results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Verdict = Literal["ok", "failed", "time", "memory", "output", "compile"]
"""Ended with status 0; ended with another status or by a signal; stopped at the limit of time,
memory or output; or did not compile."""


@dataclass(frozen=True, slots=True)
class Program:
    """Source text and its language."""

    code: str
    language: str = "python"


@dataclass(frozen=True, slots=True)
class ProgramLimits:
    """Limits of one run of a program.

    Times are seconds of work: the CPU time of all processes, or the wall-clock time without the
    time in which they wait for a CPU, whichever is larger. The wall-clock limit is ten times as
    high. After `total_timeout_s` no further run is started. `memory_mb` is the total of all
    processes of the run; if there is a memory cgroup, it limits the sum of this, of `files_mb` and
    of the kernel's memory for them. `output_kb` is the total of both output streams.
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
    """The result of one run. `stdout` and `stderr` have what was written before it ended."""

    verdict: Verdict
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0


class SandboxError(RuntimeError):
    """A program could not be run, because the sandbox is broken or unreachable."""


class Sandbox(Protocol):
    """Runs untrusted programs."""

    at_once: int
    """Maximum number of programs that may run at the same time."""

    def knows(self, language: str) -> bool:
        """Return whether the sandbox can run programs in `language`."""
        ...

    def run(self, program: Program, stdins: Sequence[str]) -> Iterator[ProgramResult]:
        """Yield the result of the program for each standard input, in order.

        The program is compiled once. No further result follows a verdict of "compile" or the end of
        the total time. May be called from several threads. Raises SandboxError if the program could
        not be run, and RewardError if no program can be run; that error names the missing setting
        or package.
        """
        ...

    def converse(
        self, program: Program, judge_from: Callable[[int], Program], count: int
    ) -> Iterator[ProgramResult]:
        """Yield the results of `count` tests of a program that a judge makes, in order.

        Each of the two reads the lines of the other, in a sandbox of its own. `judge_from(n)` is
        the judge of the tests from number n on. A result with verdict "ok" has the judge's verdict
        as `stdout` (see `conversation`); another verdict says how the program ended in that test.
        No result follows the end of the total time. Raises the same errors as `run`.
        """
        ...
