"""Helpers: small limits, a marker for tests that need isolation, and a change of the user."""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Callable

import pytest

from slipstream.errors import RewardError
from slipstream.rewards.sandbox import local
from slipstream.rewards.sandbox.local import BubblewrapSandbox
from slipstream.rewards.sandbox.memory_cgroup import memory_groups
from slipstream.rewards.sandbox.protocol import Program, ProgramLimits, ProgramResult

LIMITS = ProgramLimits(
    run_timeout_s=1.5,
    compile_timeout_s=5.0,
    total_timeout_s=10.0,
    memory_mb=256,
    files_mb=8,
    output_kb=64,
    processes=16,
)


def _isolation_error() -> str | None:
    try:
        list(BubblewrapSandbox().run(Program("pass"), [""]))
    except RewardError as error:
        return str(error)
    return None


ISOLATION_ERROR = _isolation_error()

isolated = pytest.mark.skipif(ISOLATION_ERROR is not None, reason=str(ISOLATION_ERROR))
"""Marker of tests that need bubblewrap."""


def run(code: str, stdin: str = "", language: str = "python") -> ProgramResult:
    """Run a program once, isolated."""
    (ran,) = BubblewrapSandbox(LIMITS).run(Program(code, language), [stdin])
    return ran


_USER = 54321
"""An ordinary user, who need not have a name."""


def as_user(task: Callable[[], object]) -> None:
    """Run a task as an ordinary user, in a fork of this process, which must belong to root.

    An error of the task fails the test. Skips it if users cannot be changed or cannot isolate.
    """
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about forks with threads
        child = os.fork()
    if child == 0:
        os.write(writer, _outcome_as_user(task).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        outcome = stream.read()
    os.waitpid(child, 0)
    if outcome.startswith("skip"):
        pytest.skip(outcome)
    assert outcome == "done"


def _outcome_as_user(task: Callable[[], object]) -> str:
    try:
        try:
            os.chdir("/")
            os.setgroups([])
            os.setresgid(_USER, _USER, _USER)
            os.setresuid(_USER, _USER, _USER)
        except OSError as error:
            return f"skip: the user cannot be changed here: {error}"
        memory_groups.cache_clear()
        local._check_bubblewrap.cache_clear()
        if (reason := _isolation_error()) is not None:
            return f"skip: users cannot isolate here: {reason}"
        task()
    except BaseException:
        return traceback.format_exc()
    return "done"
