"""Runs programs on this machine, isolated by bubblewrap, or without isolation if so configured.

Isolated means: own user, process, network, mount and IPC namespaces; a file system with only the
system's programs and libraries, read-only, plus an empty folder in memory; no capabilities; a
filter of system calls; and limits on time, memory, processes, files and output. If this process may
make memory cgroups, the limit on memory includes the kernel's memory for the program.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import signal
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import IO

from slipstream.errors import RewardError
from slipstream.rewards.sandbox.conversation import VERDICT, conversations
from slipstream.rewards.sandbox.languages import PATH, SYSTEM_FOLDERS, Toolchain, knows, toolchain
from slipstream.rewards.sandbox.memory_cgroup import REMEDY, MemoryGroup, memory_groups
from slipstream.rewards.sandbox.protocol import (
    DEFAULT_LIMITS,
    Program,
    ProgramLimits,
    ProgramResult,
    SandboxError,
    Verdict,
)
from slipstream.rewards.sandbox.system_calls import call_filter
from slipstream.rewards.sandbox.watched import (
    Bounds,
    Command,
    Ended,
    Line,
    run_conversation,
    run_watched,
)

_log = logging.getLogger(__name__)

_BOX = "/box"
_GIVEN = "given"
_COPIED = f'cp {_GIVEN} "$0" && chmod +x "$0" && exec "$@"'
"""Runs a copy of the program file. The original may still be open for writing in a process that
another thread has just forked, and starting it would fail ("text file busy")."""

_SUPERVISED = ("/bin/sh", "-c", '"$@"; exit $?', "sh")
"""Runs the program as a child of a shell with the same limits. As process 1, the shell collects
processes that have lost their parent. Signals, which process 1 ignores, reach the program."""

_BINARY_BYTES = 64 << 20
_MB = 1 << 20
_FILES = 64
"""Open files of a process. Buffers of sockets are memory of the kernel. Without a memory cgroup it
is not counted, but 16 processes with 64 sockets of 208 KiB hold 208 MiB at most."""
_OWN_MB = 16
"""Memory of bubblewrap and of the shells before the program."""
_OWN_PROCESSES = 8
"""More processes than those of bubblewrap and of the shells."""
_NOBODY = 65534

_ENVIRONMENT = {
    "PATH": PATH,
    "HOME": _BOX,
    "TMPDIR": _BOX,
    "LANG": "C.UTF-8",
    # Deterministic results, and one thread for libraries that would otherwise use all cores.
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}

_REMEDY = (
    "install bubblewrap (on Debian and Ubuntu: apt install bubblewrap), set "
    "reward_model.sandbox_fusion.url to a Sandbox Fusion service, or set "
    "reward_model.sandbox.run_untrusted_code_without_isolation=true, with which programs written "
    "by a model can read, change and send everything that you can"
)


class _LocalSandbox(ABC):
    """Base class. `python` is the interpreter of Python programs; None is the system's.

    `cgroups`: limit memory by cgroups if this process may make them.
    """

    def __init__(
        self,
        limits: ProgramLimits = DEFAULT_LIMITS,
        *,
        python: str | None = None,
        cgroups: bool = True,
    ) -> None:
        self._limits = limits
        self._python = python
        self._cgroups = cgroups
        self.at_once = _processors()

    def knows(self, language: str) -> bool:
        """Return whether the language is supported."""
        return knows(language)

    def run(self, program: Program, stdins: Sequence[str]) -> Iterator[ProgramResult]:
        """Yield the result of the program for each standard input (see `Sandbox.run`)."""
        self._check()
        limits = self._limits
        tools = toolchain(program.language, self._python, for_all=self._as_nobody)
        binary = program.code.encode("utf-8", "replace")
        spent = 0.0
        if tools.compile:
            ended = self._compiled(tools, binary)
            spent += ended.seconds
            if ended.verdict != "ok" or ended.status:
                yield ProgramResult("compile", stderr=_text(ended.stderr), seconds=ended.seconds)
                return
            binary = ended.stdout
        for place, stdin in enumerate(stdins):
            if place and spent >= limits.total_timeout_s:
                return
            with self._box(tools, binary, limits.run_timeout_s) as box:
                bounds = Bounds(limits.run_timeout_s, limits.memory_mb, limits.output_kb * 1024)
                ended = run_watched(box.command, bounds, stdin=stdin.encode("utf-8", "replace"))
                box.check(ended)
            spent += ended.seconds
            yield program_result(ended)

    def converse(
        self, program: Program, judge_from: Callable[[int], Program], count: int
    ) -> Iterator[ProgramResult]:
        """Yield the results of tests that a judge makes (see `Sandbox.converse`)."""
        self._check()
        return conversations(
            lambda judge: self._held(program, judge), judge_from, count, self._limits
        )

    def _held(self, program: Program, judge: Program) -> Iterator[ProgramResult]:
        limits = self._limits
        bounds = Bounds(limits.run_timeout_s, limits.memory_mb, limits.output_kb * 1024)
        with ExitStack() as stack:
            boxes: list[Box] = []
            for one in (program, judge):
                tools = toolchain(one.language, self._python, for_all=self._as_nobody)
                binary = one.code.encode("utf-8", "replace")
                # One process serves all tests, so the kernel's limit of CPU time is the total.
                box = stack.enter_context(self._box(tools, binary, limits.total_timeout_s))
                boxes.append(box)
            ours, judges = boxes
            silent = True
            for part in run_conversation(
                ours.command, judges.command, bounds, mark=VERDICT.encode()
            ):
                silent = False
                if isinstance(part, Line):
                    yield ProgramResult("ok", _text(part.text), seconds=part.seconds)
                else:
                    yield program_result(part)
            if silent:
                judges.check(Ended("ok", 0, b"", b"", 0.0))
                # The program's output has stopped the judge.
                yield ProgramResult("failed", stderr="the judge of the tests ended early")

    def _compiled(self, tools: Toolchain, source: bytes) -> Ended:
        """Compile in the box as well, because source text can make a compiler run forever.

        The binary is returned on standard output.
        """
        limits = self._limits
        compiling = replace(
            tools,
            binary="",
            run=("/bin/sh", "-c", '"$@" && cat program', "sh", *tools.compile),
        )
        with self._box(compiling, source, limits.compile_timeout_s) as box:
            bounds = Bounds(limits.compile_timeout_s, limits.memory_mb, _BINARY_BYTES)
            ended = run_watched(box.command, bounds, stdin=b"")
            box.check(ended)
            return ended

    @contextmanager
    def _box(self, tools: Toolchain, content: bytes, timeout_s: float) -> Iterator[Box]:
        """Return a box whose command joins a memory cgroup of its own, if there can be one."""
        with (
            self._group(len(content)) as group,
            self._boxed(tools, content, timeout_s) as box,
        ):
            yield replace(box, command=replace(box.command, group=group))

    @contextmanager
    def _group(self, content: int) -> Iterator[MemoryGroup | None]:
        groups = memory_groups().groups if self._cgroups else None
        if groups is None:
            if self._cgroups:
                _warn_without_cgroups()
            yield None
            return
        limits = self._limits
        # Files of the program are in memory too. Each process needs page tables and a stack.
        memory = limits.memory_mb + limits.files_mb + limits.processes // 2 + _OWN_MB
        processes = limits.processes + _OWN_PROCESSES
        with groups.group(memory * _MB + content, processes) as group:
            yield group

    @property
    def _as_nobody(self) -> bool:
        """Whether programs run as a user who can read only what everybody can read."""
        return False

    @abstractmethod
    def _check(self) -> None:
        """Raise RewardError if programs cannot run here."""

    @abstractmethod
    def _boxed(
        self, tools: Toolchain, content: bytes, timeout_s: float
    ) -> AbstractContextManager[Box]:
        """Return a box with one file, in which the tools' command runs."""


@dataclass(frozen=True, slots=True)
class Box:
    """A command that runs isolated. `check` raises SandboxError if it could not be isolated."""

    command: Command
    check: Callable[[Ended], None] = lambda ended: None


class BubblewrapSandbox(_LocalSandbox):
    """Isolates programs with `bwrap`."""

    @property
    def _as_nobody(self) -> bool:
        # The limit on the number of processes does not apply to root, so run as another user.
        return os.getuid() == 0

    def _check(self) -> None:
        _check_bubblewrap()

    @contextmanager
    def _boxed(self, tools: Toolchain, content: bytes, timeout_s: float) -> Iterator[Box]:
        name = tools.binary or tools.source
        with ExitStack() as stack:
            program = stack.enter_context(_file_with(content))
            calls = stack.enter_context(_file_with(call_filter()))
            status = stack.enter_context(tempfile.TemporaryFile())
            fds = [program.fileno(), calls.fileno(), status.fileno()]
            bwrap = [
                *_dropping_root(),
                *("bwrap", "--unshare-all", "--unshare-user", "--disable-userns"),
                *("--die-with-parent", "--new-session", "--cap-drop", "ALL", "--hostname", "box"),
                # Otherwise bwrap's own process, without limits, would be process 1 of the box, and
                # the program could write into its memory.
                "--as-pid-1",
                *("--seccomp", str(fds[1]), "--json-status-fd", str(fds[2])),
                *_file_system(tools.folders, self._limits.files_mb * _MB),
                *("--perms", "0555", "--ro-bind-data", str(fds[0]), f"{_BOX}/{name}"),
                *("--remount-ro", "/", "--chdir", _BOX, "--"),
            ]

            def check(ended: Ended) -> None:
                status.seek(0)
                if ended.verdict == "ok" and not _has_run(status.read()):
                    raise SandboxError(
                        f"bwrap ended with {ended.status}: {_text(ended.stderr)[-500:]}"
                    )

            limits = resource_limits(self._limits, timeout_s)
            arguments = [*bwrap, *limits, *_SUPERVISED, *tools.run]
            yield Box(Command(arguments, _ENVIRONMENT, fds=fds, files=_BOX), check)


class UnisolatedSandbox(_LocalSandbox):
    """Runs programs without isolation, as the current user.

    Time, output, and the resources of each process are limited. Use it only on a machine that is
    itself isolated, such as a container without any data.
    """

    def _check(self) -> None:
        """Do nothing: running the first program shows whether a tool is missing."""

    @contextmanager
    def _boxed(self, tools: Toolchain, content: bytes, timeout_s: float) -> Iterator[Box]:
        name = tools.binary or tools.source
        with tempfile.TemporaryDirectory(prefix="slipstream-code-") as folder:
            Path(folder, _GIVEN).write_bytes(content)
            # The kernel counts all processes of a user, so their number is not limited here.
            limits = resource_limits(self._limits, timeout_s, processes=False)
            arguments = [*limits, "/bin/sh", "-c", _COPIED, name, *tools.run]
            environment = {**_ENVIRONMENT, "HOME": folder, "TMPDIR": folder}
            yield Box(Command(arguments, environment, Path(folder)))


def program_result(ended: Ended) -> ProgramResult:
    """Convert the end of a process to the result of its program."""
    verdict: Verdict = ended.verdict
    if verdict == "ok" and ended.status:
        # bwrap and shells report a signal as 128 plus its number.
        by_clock = ended.status in (-signal.SIGXCPU, 128 + signal.SIGXCPU)
        verdict = "time" if by_clock else "failed"
    return ProgramResult(verdict, _text(ended.stdout), _text(ended.stderr), ended.seconds)


def resource_limits(
    limits: ProgramLimits, timeout_s: float, *, processes: bool = True
) -> tuple[str, ...]:
    """Return a command prefix that sets hard resource limits for the command after it."""
    seconds = math.ceil(timeout_s)
    memory, files = limits.memory_mb * _MB, limits.files_mb * _MB
    return (
        "prlimit",
        f"--cpu={seconds}:{seconds + 1}",
        f"--as={memory}:{memory}",
        f"--fsize={files}:{files}",
        "--core=0:0",
        f"--nofile={_FILES}:{_FILES}",
        "--memlock=0:0",
        *([f"--nproc={limits.processes}:{limits.processes}"] if processes else []),
        "--",
    )


def _file_system(folders: Sequence[str], size: int) -> list[str]:
    shown: list[str] = []
    for folder in SYSTEM_FOLDERS:
        if os.path.islink(folder):
            shown += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            shown += ["--ro-bind", folder, folder]
    for folder in folders:
        shown += ["--ro-bind", folder, folder]
    # Libraries found through the system's alternatives links, and the linker's cache.
    for file in ("/etc/alternatives", "/etc/ld.so.cache"):
        shown += ["--ro-bind-try", file, file]
    memory = ["--size", str(size), "--tmpfs"]
    return [
        *shown,
        # Read-only, /proc offers neither the memory of processes nor settings for writing.
        *("--proc", "/proc", "--remount-ro", "/proc", "--dev", "/dev", "--remount-ro", "/dev"),
        *(*memory, _BOX),
    ]


def _dropping_root() -> tuple[str, ...]:
    if os.getuid() != 0:
        return ()
    nobody = f"--reuid={_NOBODY}", f"--regid={_NOBODY}"
    return ("setpriv", *nobody, "--clear-groups", "--")


def _has_run(status: bytes) -> bool:
    """Return whether the command started and ended, from bwrap's status (one mapping per line)."""
    return any("exit-code" in json.loads(line) for line in status.splitlines() if line.strip())


def _file_with(content: bytes) -> IO[bytes]:
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    file.write(content)
    file.seek(0)
    return file


def _processors() -> int:
    """Return the number of CPU cores this process may use, which a container may restrict."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


@cache
def _warn_without_cgroups() -> None:
    """Log once that the memory of programs is measured instead of limited."""
    _log.warning(
        "no cgroup limits the memory of programs: it is measured, without the memory of the kernel "
        "for them (%s); %s",
        memory_groups().reason,
        REMEDY,
    )


@cache
def _check_bubblewrap() -> None:
    """Raise RewardError if programs cannot be isolated here."""
    for tool in ("bwrap", "prlimit", *(["setpriv"] if os.getuid() == 0 else [])):
        if shutil.which(tool, path=PATH) is None:
            raise RewardError(
                f"code written by a model is run in isolation, but {tool} is missing: {_REMEDY}"
            )
    probe = [*_dropping_root(), "bwrap", "--unshare-all", "--unshare-user", "--disable-userns"]
    probe += [*_file_system((), _MB), "--", "true"]
    tried = subprocess.run(probe, capture_output=True, text=True, env=_ENVIRONMENT, timeout=30)
    if tried.returncode:
        raise RewardError(
            "code written by a model is run in isolation, but bubblewrap is not allowed to isolate "
            f"here ({tried.stderr.strip()[-300:]}): allow user namespaces (sysctl "
            "kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0; a "
            f"container: --security-opt seccomp=unconfined), or {_REMEDY.partition(', ')[2]}"
        )
