"""Runs commands, and stops them at their limits of time, memory and output.

Knows processes, not isolation. Used by the sandboxes of this machine.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import psutil

from slipstream.rewards.sandbox.memory_cgroup import MemoryGroup
from slipstream.rewards.sandbox.protocol import Verdict

_POLL_S = 0.05
_CHUNK = 1 << 16
_KEPT_ERR = 4096
"""Bytes of standard error that are kept in a conversation."""
_MB = 1 << 20
_INODE_BYTES = 1280
"""An empty file in memory: its inode, its directory entry and a name of middle length."""

PATIENCE = 10.0
"""Wall-clock limit of a run, as a multiple of its limit of counted time (see `Meter`)."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a process. `status` is `Popen.returncode`. Verdict "ok": no limit was reached."""

    verdict: Verdict
    status: int
    stdout: bytes
    stderr: bytes
    seconds: float


@dataclass(frozen=True, slots=True)
class Command:
    """A command and its surroundings. `fds` stay open in the process, which joins `group`.

    `files` is a folder in memory in the command's own root. Without a group, its inodes count as
    memory of the command.
    """

    arguments: Sequence[str]
    environment: Mapping[str, str]
    cwd: Path | None = None
    fds: Sequence[int] = ()
    group: MemoryGroup | None = None
    files: str | None = None


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of a run: counted seconds, memory of all processes, and bytes of output."""

    timeout_s: float
    memory_mb: int
    output_bytes: int


@dataclass(frozen=True, slots=True)
class Line:
    """A line that the judge wrote for us, and the counted seconds since the line before it."""

    text: bytes
    seconds: float


def run_watched(command: Command, bounds: Bounds, *, stdin: bytes) -> Ended:
    """Run a command in its own session until it ends or reaches a limit.

    Afterwards all processes of the session are killed. Raises OSError if it cannot be started, and
    SandboxError if it cannot join its group.
    """
    with tempfile.NamedTemporaryFile() as file:
        file.write(stdin)
        file.flush()
        # Open the file read-only, since the command could otherwise write to this machine's disk.
        source = Path(file.name).open("rb")  # noqa: SIM115 - closed below
    with source, _started(command, source.fileno()) as running:
        meter = Meter(_Commands([running]))
        verdict = _watch(running, meter, bounds)
        seconds = meter.seconds()
        running.check_joined()
    return Ended(
        verdict, running.process.returncode, bytes(running.out), bytes(running.err), seconds
    )


def run_conversation(
    program: Command, judge: Command, bounds: Bounds, *, mark: bytes
) -> Iterator[Line | Ended]:
    """Run two commands, each of which reads the lines of the other.

    Yields the judge's lines that begin with `mark`, which are for the caller. Every such line
    starts the program's time anew. If the judge reaches its end, nothing follows. Otherwise, the
    last value is the end of the program that has stopped the conversation. Raises SandboxError if
    one of the two cannot join its group.
    """
    with _started(program, subprocess.PIPE) as one, _started(judge, subprocess.PIPE) as other:
        meter = Meter(_Commands([one, other]))
        yield from _Conversation(one, other, meter, bounds, mark).lines()


@dataclass(frozen=True, slots=True)
class Usage:
    """Times of a process in seconds, since its start.

    `cpu` is its own CPU time. `children_cpu` is the CPU time of children that have ended and that
    it has waited for. `waited` is the time in which its threads waited for a CPU.
    """

    cpu: float
    children_cpu: float = 0.0
    waited: float = 0.0


@dataclass(frozen=True, slots=True)
class Reading:
    """Processes by id, and their memory in bytes; shared pages count once."""

    processes: Mapping[int, Usage]
    memory: int = 0


class Readings(Protocol):
    """Where a meter reads."""

    def read(self) -> Reading:
        """Return the present state of the measured processes and of their descendants."""
        ...

    def own_wait(self) -> float:
        """Return how many seconds the calling thread has waited for a CPU since its start."""
        ...


class Meter:
    """Counts the time and the memory of some processes and their descendants.

    The counted time is the larger of two values: the CPU time of all processes, and the wall-clock
    time without the time in which a process waited for a CPU. So a busy machine does not shorten
    the time of a program, and a program that sleeps is stopped too.
    """

    def __init__(self, readings: Readings, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._readings, self._clock = readings, clock
        self._looked = clock()
        self._own_wait = readings.own_wait()
        self._before: Mapping[int, Usage] = {}
        self._ended_cpu = 0.0
        self.restart()

    def restart(self) -> None:
        """Count from now on."""
        self._began = self._clock()
        self._spent, self._starved = 0.0, 0.0

    @property
    def due(self) -> bool:
        """Whether the last look is old."""
        return self._clock() - self._looked >= _POLL_S

    def look(self) -> int:
        """Measure, and return the memory in bytes; shared pages count once."""
        now = self._clock()
        reading = self._readings.read()
        own_wait = self._readings.own_wait()
        # While this thread waits for a CPU, the program may wait for this thread.
        waited = max(own_wait - self._own_wait, 0.0)
        cpu, children_cpu = 0.0, 0.0
        for pid, usage in reading.processes.items():
            before = self._before.get(pid, Usage(0.0))
            cpu += max(usage.cpu - before.cpu, 0.0)
            children_cpu += max(usage.children_cpu - before.children_cpu, 0.0)
            waited += max(usage.waited - before.waited, 0.0)
        # When a process has ended, all its CPU time becomes part of its parent's `children_cpu`,
        # now or later or, if the parent ignores its children, never. What was counted already is
        # not counted again.
        for pid in self._before.keys() - reading.processes.keys():
            self._ended_cpu += self._before[pid].cpu + self._before[pid].children_cpu
        counted = min(children_cpu, self._ended_cpu)
        self._ended_cpu -= counted
        self._spent += cpu + children_cpu - counted
        self._starved += min(waited, now - max(self._looked, self._began))
        self._before, self._own_wait, self._looked = reading.processes, own_wait, now
        return reading.memory

    def seconds(self) -> float:
        """Return the counted time in seconds."""
        return max(self._spent, self._clock() - self._began - self._starved)

    def over(self, timeout_s: float) -> bool:
        """Return whether the counted time, or the wall-clock time, is over its limit."""
        return self.seconds() >= timeout_s or self._clock() - self._began >= PATIENCE * timeout_s


@dataclass(slots=True)
class _Running:
    process: subprocess.Popen[bytes]
    command: Command
    out: bytearray = field(default_factory=bytearray)
    err: bytearray = field(default_factory=bytearray)

    @property
    def out_of_memory(self) -> bool:
        """Whether the kernel has killed a process of the command at the limit of its group."""
        return self.command.group is not None and self.command.group.out_of_memory()

    def check_joined(self) -> None:
        """Raise SandboxError if the process could not join the command's group."""
        if self.command.group is not None:
            self.command.group.check_joined(bytes(self.err))

    def __enter__(self) -> _Running:
        return self

    def family(self) -> list[psutil.Process]:
        """Return the process and its descendants."""
        if self.command.group is None:
            return _descendants(self.process.pid)
        return [one for pid in self.command.group.members() for one in _process(pid)]

    def kernel_memory(self, family: Sequence[psutil.Process]) -> int:
        """Return an estimate in bytes of the kernel's memory that no group counts."""
        if self.command.group is not None or self.command.files is None:
            return 0
        return _INODE_BYTES * _inodes(self.command.files, family)

    def __exit__(self, *error: object) -> None:
        # Kill the whole session, because child processes may still be running.
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                with suppress(OSError):
                    stream.close()


def _started(command: Command, stdin: int) -> _Running:
    group = command.group
    process = subprocess.Popen(
        command.arguments if group is None else group.joined(command.arguments),
        bufsize=0,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(command.environment),
        cwd=command.cwd,
        pass_fds=tuple(command.fds),
        start_new_session=True,
    )
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            os.set_blocking(stream.fileno(), False)
    return _Running(process, command)


def _watch(running: _Running, meter: Meter, bounds: Bounds) -> Verdict:
    process = running.process
    assert process.stdout is not None
    assert process.stderr is not None
    with selectors.DefaultSelector() as streams:
        streams.register(process.stdout, selectors.EVENT_READ, running.out)
        streams.register(process.stderr, selectors.EVENT_READ, running.err)
        while True:
            over = process.poll() is not None
            wait = 0.0 if over else _POLL_S
            ready = streams.select(wait) if streams.get_map() else []
            for key, _ in ready:
                if chunk := os.read(key.fd, _CHUNK):
                    key.data.extend(chunk)
                else:
                    streams.unregister(key.fileobj)
            if len(running.out) + len(running.err) > bounds.output_bytes:
                return "output"
            if over and not ready:
                return "memory" if running.out_of_memory else "ok"
            if not streams.get_map() and not over:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(wait)
            if meter.due and (meter.look() > bounds.memory_mb * _MB or running.out_of_memory):
                return "memory"
            if meter.over(bounds.timeout_s):
                return "time"


class _Conversation:
    """Passes lines between a program and a judge."""

    def __init__(
        self, program: _Running, judge: _Running, meter: Meter, bounds: Bounds, mark: bytes
    ) -> None:
        self._program, self._judge, self._meter = program, judge, meter
        self._bounds, self._mark = bounds, mark
        self._to_program, self._to_judge = bytearray(), bytearray()
        self._partial = bytearray()
        self._ready: list[bytes] = []
        self._written = 0
        self._streams = selectors.DefaultSelector()

    def lines(self) -> Iterator[Line | Ended]:
        """Yield the judge's lines for the caller, and the end if a limit stopped the program."""
        with self._streams:
            for running, read in (
                (self._program, self._from_program),
                (self._judge, self._from_judge),
            ):
                self._streams.register(_fd(running.process.stdout), selectors.EVENT_READ, read)
                self._streams.register(
                    _fd(running.process.stderr),
                    selectors.EVENT_READ,
                    partial(self._noise, running),
                )
            while True:
                verdict = self._step()
                # Before any verdict: a program that never ran has not failed its test.
                self._program.check_joined()
                self._judge.check_joined()
                for text in self._ready:
                    yield Line(text, self._meter.seconds())
                    self._meter.restart()
                    self._written = 0
                self._ready.clear()
                if verdict is None:
                    continue
                if verdict == "ok":
                    with suppress(subprocess.TimeoutExpired):
                        self._judge.process.wait(_POLL_S * 20)
                else:
                    err = bytes(self._program.err)
                    yield Ended(verdict, 0, b"", err, self._meter.seconds())
                return

    def _step(self) -> Verdict | None:
        """Pass what is ready. Returns the verdict if the conversation is over."""
        for key, _ in self._streams.select(_POLL_S):
            key.data(key.fd)
        self._send(self._program, self._to_program)
        self._send(self._judge, self._to_judge)
        over = _fd(self._judge.process.stdout) not in self._streams.get_map()
        if over:
            # A judge that runs out of memory does so because of what the program has sent.
            return "memory" if self._judge.out_of_memory else "ok"
        if _fd(self._program.process.stdout) not in self._streams.get_map() and not self._to_judge:
            # The judge notices the end of its input.
            _close(self._judge)
        if self._written > self._bounds.output_bytes:
            return "output"
        if self._meter.due and (
            self._meter.look() > 2 * self._bounds.memory_mb * _MB
            or self._program.out_of_memory
            or self._judge.out_of_memory
        ):
            return "memory"
        return "time" if self._meter.over(self._bounds.timeout_s) else None

    def _from_program(self, fd: int) -> None:
        chunk = self._chunk(fd)
        self._to_judge += chunk
        self._written += len(chunk)

    def _from_judge(self, fd: int) -> None:
        self._partial += self._chunk(fd)
        *lines, rest = self._partial.split(b"\n")
        self._partial = bytearray(rest)
        for line in lines:
            if line.startswith(self._mark):
                self._ready.append(bytes(line))
            else:
                self._to_program += line + b"\n"

    def _noise(self, running: _Running, fd: int) -> None:
        chunk = self._chunk(fd)
        self._written += len(chunk)
        # Only the beginning: a message of the shell that joins the group comes first.
        running.err.extend(chunk[: max(_KEPT_ERR - len(running.err), 0)])

    def _chunk(self, fd: int) -> bytes:
        chunk = os.read(fd, _CHUNK)
        if not chunk:
            self._streams.unregister(fd)
        return chunk

    @staticmethod
    def _send(running: _Running, data: bytearray) -> None:
        stream = running.process.stdin
        if not data or stream is None or stream.closed:
            return
        try:
            del data[: os.write(stream.fileno(), data[:_CHUNK])]
        except BlockingIOError:
            return
        except OSError:
            data.clear()  # the process has ended


def _fd(stream: object) -> int:
    fd: int = stream.fileno()  # type: ignore[attr-defined]
    return fd


def _close(running: _Running) -> None:
    if running.process.stdin is not None:
        with suppress(OSError):
            running.process.stdin.close()


@dataclass(frozen=True, slots=True)
class _Commands:
    """Reads the processes of running commands."""

    running: Sequence[_Running]

    def read(self) -> Reading:
        """Return the processes of the commands and their memory (see `Readings.read`)."""
        families = [one.family() for one in self.running]
        members = [member for family in families for member in family]
        usages = {member.pid: usage for member in members for usage in _usage(member)}
        pairs = zip(self.running, families, strict=True)
        kernel = sum(one.kernel_memory(family) for one, family in pairs)
        return Reading(usages, _memory(members) + kernel)

    def own_wait(self) -> float:
        """Return how many seconds the calling thread has waited for a CPU since its start."""
        return _delay_seconds("/proc/self/task", str(threading.get_native_id()))


def _descendants(pid: int) -> list[psutil.Process]:
    return [each for one in _process(pid) for each in [one, *_children(one)]]


def _process(pid: int) -> list[psutil.Process]:
    """Return the process if it still exists."""
    with suppress(psutil.Error):
        return [psutil.Process(pid)]
    return []


def _children(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return list(process.children(recursive=True))
    return []


def _usage(process: psutil.Process) -> list[Usage]:
    """Return the times of a process if it still exists."""
    waited = _delay_seconds(f"/proc/{process.pid}/task")
    with suppress(psutil.Error):
        times = process.cpu_times()
        ended = times.children_user + times.children_system
        return [Usage(times.user + times.system, ended, waited)]
    return []


def _delay_seconds(folder: str, pattern: str = "*") -> float:
    """Return how long the threads in a folder of /proc have waited for a CPU; 0 if unknown."""
    total = 0
    with suppress(OSError, ValueError, IndexError):
        for thread in Path(folder).glob(pattern):
            total += int((thread / "schedstat").read_text().split()[1])
    return 1e-9 * total


def _inodes(folder: str, family: Sequence[psutil.Process]) -> int:
    """Return the number of inodes of a file system that processes with their own root see."""
    for member in reversed(family):
        root = f"/proc/{member.pid}/root"
        with suppress(OSError):
            if os.stat(root).st_dev != os.stat("/").st_dev:
                used = os.statvfs(root + folder)
                return used.f_files - used.f_ffree
    return 0


def _memory(family: Sequence[psutil.Process]) -> int:
    """Return the memory in bytes of some processes, shared pages counted once."""
    # RSS is quick to read but an upper bound: it counts shared pages once per process.
    bound = sum(_of(member, "rss") for member in family)
    return bound if len(family) == 1 else min(bound, sum(_share(m) for m in family))


def _share(process: psutil.Process) -> int:
    """Return the proportional set size, or RSS if this process may not read it."""
    return _of(process, "pss") or _of(process, "rss")


def _of(process: psutil.Process, kind: str) -> int:
    with suppress(psutil.Error):
        info = process.memory_info() if kind == "rss" else process.memory_full_info()
        return int(getattr(info, kind))
    return 0
