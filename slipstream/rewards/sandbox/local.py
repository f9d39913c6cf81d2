"""Programs on this machine: isolated by bubblewrap, or, where a setting says so, not at all.

Isolated means: a user, process, network, mount and IPC namespace of its own; of the file system the
system's programs and libraries, read-only, and an empty folder in memory; no capabilities, a filter
of system calls, and limits of time, memory, processes, files and output.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import IO

from slipstream.errors import RewardError
from slipstream.rewards.sandbox.languages import PATH, SYSTEM_FOLDERS, Toolchain, knows, toolchain
from slipstream.rewards.sandbox.protocol import (
    DEFAULT_LIMITS,
    Program,
    ProgramLimits,
    ProgramResult,
    SandboxError,
    Verdict,
    in_time,
)
from slipstream.rewards.sandbox.system_calls import call_filter
from slipstream.rewards.sandbox.watched import Ended, run_watched

_BOX = "/box"
_GIVEN = "given"
_COPIED = f'cp {_GIVEN} "$0" && chmod +x "$0" && exec "$@"'
"""A program that this process has written could be open for writing still in what another thread
has just started, and would then not run ("text file busy")."""

_BINARY_BYTES = 64 << 20
_MB = 1 << 20
_NOBODY = 65534

_ENVIRONMENT = {
    "PATH": PATH,
    "HOME": _BOX,
    "TMPDIR": _BOX,
    "LANG": "C.UTF-8",
    # The same answer for the same program, and one thread of those libraries that would take all.
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}

_REMEDY = (
    "install bubblewrap (on Debian and Ubuntu: apt install bubblewrap), set "
    "reward_model.sandbox_fusion.url to a Sandbox Fusion service, or set "
    "reward_model.sandbox.run_untrusted_code_without_isolation=true, with which programs that a "
    "model wrote can read, change and send whatever you can"
)


class _LocalSandbox(ABC):
    """`python`: the interpreter of Python programs; None: the system's."""

    def __init__(
        self, limits: ProgramLimits = DEFAULT_LIMITS, *, python: str | None = None
    ) -> None:
        self._limits = limits
        self._python = python
        self.at_once = _processors()

    def knows(self, language: str) -> bool:
        """See `Sandbox.knows`."""
        return knows(language)

    def run(self, program: Program, stdins: Sequence[str]) -> Iterator[ProgramResult]:
        """See `Sandbox.run`."""
        self._check()
        began = time.monotonic()
        tools = toolchain(program.language, self._python, for_all=self._as_nobody)
        binary = program.code.encode("utf-8", "replace")
        if tools.compile:
            ended = self._compiled(tools, binary)
            if ended.verdict != "ok" or ended.status:
                yield ProgramResult("compile", stderr=_text(ended.stderr), seconds=ended.seconds)
                return
            binary = ended.stdout
        for stdin in in_time(stdins, self._limits, began):
            yield ran(self._once(tools, binary, stdin))

    def _once(self, tools: Toolchain, binary: bytes, stdin: str) -> Ended:
        return self._in_box(
            tools,
            (tools.binary or tools.source, binary),
            tools.run,
            stdin=stdin.encode("utf-8", "replace"),
            timeout_s=self._limits.run_timeout_s,
            output_bytes=self._limits.output_kb * 1024,
        )

    def _compiled(self, tools: Toolchain, source: bytes) -> Ended:
        """A compiler is the system's, but what it is given may make it compute for ever; its
        product comes back by standard output."""
        return self._in_box(
            tools,
            (tools.source, source),
            ("/bin/sh", "-c", '"$@" && cat program', "sh", *tools.compile),
            stdin=b"",
            timeout_s=self._limits.compile_timeout_s,
            output_bytes=_BINARY_BYTES,
        )

    @property
    def _as_nobody(self) -> bool:
        """Whether programs run as a user who may read only what everybody may."""
        return False

    @abstractmethod
    def _check(self) -> None:
        """Raises RewardError where nothing can run here."""

    @abstractmethod
    def _in_box(
        self,
        tools: Toolchain,
        file: tuple[str, bytes],
        command: Sequence[str],
        *,
        stdin: bytes,
        timeout_s: float,
        output_bytes: int,
    ) -> Ended:
        """Run a command in a folder of its own that holds one file, by name and content."""


class BubblewrapSandbox(_LocalSandbox):
    """Isolates by `bwrap`."""

    @property
    def _as_nobody(self) -> bool:
        # Root's processes are never too many: only those of other users can be limited in number.
        return os.getuid() == 0

    def _check(self) -> None:
        _check_bubblewrap()

    def _in_box(
        self,
        tools: Toolchain,
        file: tuple[str, bytes],
        command: Sequence[str],
        *,
        stdin: bytes,
        timeout_s: float,
        output_bytes: int,
    ) -> Ended:
        name, content = file
        with ExitStack() as stack:
            given = stack.enter_context(_holding(content))
            calls = stack.enter_context(_holding(call_filter()))
            told = stack.enter_context(tempfile.TemporaryFile())
            fds = [given.fileno(), calls.fileno(), told.fileno()]
            bwrap = [
                *_dropping_root(),
                *("bwrap", "--unshare-all", "--unshare-user", "--disable-userns"),
                *("--die-with-parent", "--new-session", "--cap-drop", "ALL", "--hostname", "box"),
                *("--seccomp", str(fds[1]), "--json-status-fd", str(fds[2])),
                *_file_system(tools.folders, self._limits.files_mb * _MB),
                *("--perms", "0555", "--ro-bind-data", str(fds[0]), f"{_BOX}/{name}"),
                *("--remount-ro", "/", "--chdir", _BOX, "--"),
            ]
            ended = run_watched(
                [*bwrap, *resource_limits(self._limits, timeout_s), *command],
                stdin=stdin,
                timeout_s=timeout_s,
                memory_mb=self._limits.memory_mb,
                output_bytes=output_bytes,
                environment=_ENVIRONMENT,
                fds=fds,
            )
            told.seek(0)
            if ended.verdict == "ok" and not _has_run(told.read()):
                raise SandboxError(f"bwrap ended with {ended.status}: {_text(ended.stderr)[-500:]}")
            return ended


class UnisolatedSandbox(_LocalSandbox):
    """No sandbox: programs run as this user does, with limits of time, output and of what one
    process may use. For a machine that is one itself, a container without any data."""

    def _check(self) -> None:
        """What is missing, the first program says."""

    def _in_box(
        self,
        tools: Toolchain,
        file: tuple[str, bytes],
        command: Sequence[str],
        *,
        stdin: bytes,
        timeout_s: float,
        output_bytes: int,
    ) -> Ended:
        name, content = file
        with tempfile.TemporaryDirectory(prefix="slipstream-code-") as folder:
            Path(folder, _GIVEN).write_bytes(content)
            # All processes of a user are counted, so that their number is not limited.
            limits = resource_limits(self._limits, timeout_s, processes=False)
            return run_watched(
                [*limits, "/bin/sh", "-c", _COPIED, name, *command],
                stdin=stdin,
                timeout_s=timeout_s,
                memory_mb=self._limits.memory_mb,
                output_bytes=output_bytes,
                environment={**_ENVIRONMENT, "HOME": folder, "TMPDIR": folder},
                cwd=Path(folder),
            )


def ran(ended: Ended) -> ProgramResult:
    """What the end of a process means for its program."""
    verdict: Verdict = ended.verdict
    if verdict == "ok" and ended.status:
        # bwrap and shells tell of a signal by 128 and its number.
        by_clock = ended.status in (-signal.SIGXCPU, 128 + signal.SIGXCPU)
        verdict = "time" if by_clock else "failed"
    return ProgramResult(verdict, _text(ended.stdout), _text(ended.stderr), ended.seconds)


def resource_limits(
    limits: ProgramLimits, timeout_s: float, *, processes: bool = True
) -> tuple[str, ...]:
    """The beginning of a command line, by which what follows has limits that it cannot lift."""
    seconds = math.ceil(timeout_s)
    memory, files = limits.memory_mb * _MB, limits.files_mb * _MB
    return (
        "prlimit",
        f"--cpu={seconds}:{seconds + 1}",
        f"--as={memory}:{memory}",
        f"--fsize={files}:{files}",
        "--core=0:0",
        "--nofile=256:256",
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
    # Libraries that are found by links of the system's choice, and by its index.
    for file in ("/etc/alternatives", "/etc/ld.so.cache"):
        shown += ["--ro-bind-try", file, file]
    memory = ["--size", str(size), "--tmpfs"]
    return [
        *shown,
        *("--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"),
        *(*memory, _BOX),
    ]


def _dropping_root() -> tuple[str, ...]:
    if os.getuid() != 0:
        return ()
    nobody = f"--reuid={_NOBODY}", f"--regid={_NOBODY}"
    return ("setpriv", *nobody, "--clear-groups", "--")


def _has_run(told: bytes) -> bool:
    """Whether the command was started, and has ended, by what bwrap tells: one mapping a line."""
    return any("exit-code" in json.loads(line) for line in told.splitlines() if line.strip())


def _holding(content: bytes) -> IO[bytes]:
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    file.write(content)
    file.seek(0)
    return file


def _processors() -> int:
    """Those that this process may use: a container may have a few of many."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


@cache
def _check_bubblewrap() -> None:
    """Raises RewardError where programs cannot be isolated here."""
    for tool in ("bwrap", "prlimit", *(["setpriv"] if os.getuid() == 0 else [])):
        if shutil.which(tool, path=PATH) is None:
            raise RewardError(
                f"code that a model wrote is run in isolation, and {tool} is not here: {_REMEDY}"
            )
    probe = [*_dropping_root(), "bwrap", "--unshare-all", "--unshare-user", "--disable-userns"]
    probe += [*_file_system((), _MB), "--", "true"]
    tried = subprocess.run(probe, capture_output=True, text=True, env=_ENVIRONMENT, timeout=30)
    if tried.returncode:
        raise RewardError(
            "code that a model wrote is run in isolation, and bubblewrap is not allowed to isolate "
            f"here ({tried.stderr.strip()[-300:]}): allow user namespaces (sysctl "
            "kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0; a "
            f"container: --security-opt seccomp=unconfined), or {_REMEDY.partition(', ')[2]}"
        )
