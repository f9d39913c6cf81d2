"""Scoring workers can compute, read files and start threads, and nothing else."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.rewards import lock_down, workers
from slipstream.rewards.sandbox.system_calls import filter_program
from slipstream.rewards.workers import TooMuchWorkError, WorkerPool
from tests.rewards.locked_functions import ATTEMPTS
from tests.rewards.sandbox.test_system_calls import (
    AARCH64,
    ALLOWED,
    KILLED,
    REFUSED,
    X86_64,
    answer,
)

FUNCTIONS = "tests.rewards.locked_functions"
ABSENT = 0x00050026
PID = 4711

# The functions of the attempts use numbers of x86_64.
locked = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="needs Linux on x86_64"
)

WORK = {
    "thread", "read", "list", "import", "random numbers", "map memory", "pipe", "print",
    "is a terminal", "read limits", "signal to itself", "abort",
}  # fmt: skip
"""Attempts that succeed. All others are refused."""

LATER = {"clone3", "openat2", "a call that is not known yet"}
"""Attempts that fail like on an old kernel, so that libraries use another call."""

WITH_FILE = {
    "write", "read and write", "truncate on open", "create", "append", "open without a library",
    "openat2", "rename", "unlink", "mkdir", "rmdir", "link", "symlink", "fifo", "chmod", "chown",
    "truncate", "utime", "attribute", "read", "list",
}  # fmt: skip


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(f"{FUNCTIONS}:attempt", size=1)
    yield pool
    pool.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("text")
    return tmp_path / "file"


def given(name: str, file: Path) -> list[str]:
    if name == "import":
        (file.parent / "imported_late.py").write_text("VALUE = 7\n")
        return [str(file.parent)]
    return [str(file)] if name in WITH_FILE else []


@locked
@pytest.mark.parametrize("name", sorted(ATTEMPTS.keys() - WORK))
def test_a_worker_cannot_change_anything(pool: WorkerPool, file: Path, name: str) -> None:
    expected = {"temporary file": "ENOENT"}.get(name, "ENOSYS" if name in LATER else "EPERM")
    assert pool.call(name, *given(name, file)) == expected
    assert [path.name for path in file.parent.iterdir()] == ["file"]
    assert file.read_text() == "text"
    assert pool.killed == 0


@locked
@pytest.mark.parametrize("name", sorted(WORK))
def test_a_worker_can_read_and_compute(pool: WorkerPool, file: Path, name: str) -> None:
    assert pool.call(name, *given(name, file)) == "done"
    assert not list(file.parent.rglob("*.pyc"))


@locked
def test_threads_that_a_library_started_are_locked_down_too(file: Path) -> None:
    pool = WorkerPool(
        f"{FUNCTIONS}:attempt_in_old_thread", prepare=f"{FUNCTIONS}:start_thread", size=1
    )
    assert pool.call("read", str(file)) == "done"
    assert pool.call("write", str(file)) == "EPERM"
    assert pool.call("fork") == "EPERM"
    pool.close()


@locked
def test_the_limit_of_processor_time_still_ends_a_locked_worker() -> None:
    pool = WorkerPool("tests.rewards.worker_functions:work", size=1, cpu_limit_s=0.2)
    with pytest.raises(TooMuchWorkError, match="status -27"):  # SIGPROF
        pool.call("after loop")
    pool.close()


@locked
def test_a_locked_worker_tells_the_doctor_nothing() -> None:
    pool = WorkerPool("slipstream.rewards.lock_down:still_allowed", size=1)
    assert pool.call() == ""
    pool.close()


def test_workers_that_are_not_locked_down_are_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    workers._warn_unlocked.cache_clear()
    for _ in range(2):
        pool = WorkerPool(f"{FUNCTIONS}:attempt", prepare=f"{FUNCTIONS}:pretend_no_seccomp", size=1)
        assert pool.call("thread") == "done"
        pool.close()
    workers._warn_unlocked.cache_clear()
    (message,) = caplog.messages
    assert "darwin has no seccomp" in message


@locked
def test_workers_that_are_locked_down_are_not_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    workers._warn_unlocked.cache_clear()
    pool = WorkerPool(f"{FUNCTIONS}:attempt", size=1)
    assert pool.call("thread") == "done"
    pool.close()
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("system", "machine", "reason"),
    [("darwin", "arm64", "darwin has no seccomp"), ("linux", "riscv64", "riscv64 are not listed")],
)
def test_other_systems_are_named(
    monkeypatch: pytest.MonkeyPatch, system: str, machine: str, reason: str
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert reason in (lock_down.lock_down() or "")
    assert sys.dont_write_bytecode


@pytest.mark.parametrize(
    ("name", "machine", "openat", "clone", "kill", "limit", "refused", "allowed"),
    [
        ("x86_64", X86_64, 257, 56, 62, 302, (57, 58, 59, 2**30, 41, 85, 452), (0, 1, 9, 38, 202)),
        ("aarch64", AARCH64, 56, 220, 129, 261, (221, 281, 198, 34, 452), (63, 64, 98, 103, 222)),
    ],
)
def test_the_rules_of_each_machine(
    name: str,
    machine: int,
    openat: int,
    clone: int,
    kill: int,
    limit: int,
    refused: tuple[int, ...],
    allowed: tuple[int, ...],
) -> None:
    program = filter_program(lock_down.worker_rules(PID), name)
    assert {answer(program, machine, number) for number in refused} == {REFUSED}
    assert {answer(program, machine, number) for number in allowed} == {ALLOWED}
    assert {answer(program, machine, number) for number in (435, 437, 463, 9999)} == {ABSENT}
    assert answer(program, machine ^ 1, 0) == KILLED
    closed_on_exec, folder, unnamed = 0o2000000, 0o200000, 0o20200000
    for flags in (0, closed_on_exec, closed_on_exec | folder):
        assert answer(program, machine, openat, 3, 0, flags) == ALLOWED
    for flags in (1, 2, 3, 0o100, 0o1000, 0o102 | closed_on_exec, unnamed | 2, 2**32 | 1):
        assert answer(program, machine, openat, 3, 0, flags) == REFUSED
    assert answer(program, machine, clone, 0x3D0F00) == ALLOWED
    for flags in (17, 0x4100 | 17, 0x10000000):
        assert answer(program, machine, clone, flags) == REFUSED
    assert answer(program, machine, kill, PID, 9) == ALLOWED
    for pid in (0, 1, PID + 1, -1 & 0xFFFFFFFF):
        assert answer(program, machine, kill, pid, 9) == REFUSED
    assert answer(program, machine, limit, 0, 4, 0, 1) == ALLOWED
    for pointer in (1, 2**32, 2**47):
        assert answer(program, machine, limit, 0, 4, pointer) == REFUSED
