"""Memory cgroups: a limit on all memory of a program, including the memory of the kernel for it.

Each run of a program gets a group of its own, which the program joins before it starts. Knows the
kernel's interface (versions 1 and 2 of cgroups), not programs, limits of rewards or isolation.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from slipstream.rewards.sandbox.protocol import SandboxError

_PREFIX = "slipstream"
_NAME = re.compile(rf"{_PREFIX}-(\d+)-(\d+)-(\d+)-\d+")
"""Name of a group: PID namespace, process id and start time of the owner, and a counter."""

_JOIN = 'echo 0 > "$2" || { echo "$1" >&2; exit 1; }; shift 2; exec "$@"'
"""The shell moves itself ("0") into the group, then becomes the command. If it cannot join, it
writes the reason and the group's mark to standard error. The command never sees the mark."""

_EMPTY_S = 5.0
"""Seconds to wait for the processes of a group to end after SIGKILL."""
_PROBE_BYTES = 64 << 20


REMEDY = (
    "give this process a cgroup that it may write: with systemd, start the command as "
    "`systemd-run --user --scope COMMAND`; in a container, mount /sys/fs/cgroup writable"
)


class CgroupError(SandboxError):
    """No group can be made here. The message has the reason."""


@dataclass(frozen=True, slots=True)
class _Interface:
    """Names of the kernel's files. Optional ones do not exist everywhere."""

    limit: str
    join: str
    events: str
    optional: tuple[tuple[str, str], ...]


_INTERFACES = {
    1: _Interface(
        limit="memory.limit_in_bytes",
        # Writing to `cgroup.procs` waits for all CPUs, about 10 ms. Moving a thread does not, and
        # the shell that moves itself has only one.
        join="tasks",
        events="memory.oom_control",
        optional=(("memory.memsw.limit_in_bytes", "{limit}"),),
    ),
    2: _Interface(
        limit="memory.max",
        join="cgroup.procs",
        events="memory.events",
        optional=(
            ("memory.swap.max", "0"),
            ("memory.oom.group", "1"),
            ("pids.max", "{processes}"),
        ),
    ),
}


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """The group of one run."""

    folder: Path
    version: int
    mark: str = field(default_factory=lambda: secrets.token_hex(16), compare=False)

    def joined(self, command: Sequence[str]) -> list[str]:
        """Return the command preceded by a shell that joins the group."""
        join = self.folder / _INTERFACES[self.version].join
        return ["/bin/sh", "-c", _JOIN, "sh", self.mark, str(join), *command]

    def check_joined(self, stderr: bytes) -> None:
        """Raise CgroupError if a joined command wrote that it could not join the group."""
        reason, mark, _ = stderr.decode("utf-8", "replace").partition(self.mark)
        if mark:
            raise CgroupError(
                f"a program could not join its memory cgroup {self.folder}: {reason.strip()[-200:]}"
            )

    def members(self) -> list[int]:
        """Return the ids of the processes in the group."""
        return _members(self.folder)

    def out_of_memory(self) -> bool:
        """Return whether the kernel has killed a process because of the limit."""
        with suppress(OSError, ValueError):
            lines = (self.folder / _INTERFACES[self.version].events).read_text().splitlines()
            counts = dict(line.split() for line in lines)
            return int(counts.get("oom_kill", 0)) > 0
        return False

    def remove(self) -> bool:
        """Kill the processes of the group and remove it. Return whether it is gone.

        Returns False if its processes do not end within some seconds; a later `remove_leftovers`
        tries again.
        """
        deadline, pause = time.monotonic() + _EMPTY_S, 0.0005
        while True:
            try:
                _remove(self.folder)
                return True
            except FileNotFoundError:
                return True
            except OSError as error:
                if error.errno != errno.EBUSY or time.monotonic() >= deadline:
                    return False
            # The processes of a sandbox end together with it, but not at the same moment.
            if pause > 0.002:
                _kill_all(self.folder)
            time.sleep(pause)
            pause = min(2 * pause, 0.05)


@dataclass(frozen=True, slots=True)
class MemoryGroups:
    """Makes groups in the folder of a parent group."""

    folder: Path
    version: int

    @contextmanager
    def group(self, limit_bytes: int, processes: int) -> Iterator[MemoryGroup]:
        """Make a group with a memory limit and, in version 2, a maximum number of processes.

        Removes the group afterwards, and kills its processes. Raises CgroupError if the kernel
        refuses it.
        """
        group = MemoryGroup(self.folder / _new_name(), self.version)
        try:
            try:
                _make(group.folder)
                self._limit(group.folder, limit_bytes, processes)
            except OSError as error:
                raise CgroupError(
                    f"no memory cgroup can be made in {self.folder}: {error.strerror}"
                ) from error
            yield group
        finally:
            group.remove()

    def _limit(self, folder: Path, limit_bytes: int, processes: int) -> None:
        files = _INTERFACES[self.version]
        _write(folder / files.limit, str(limit_bytes))
        for name, value in files.optional:
            # Without these files the kernel has no swap, or no controller of processes here.
            with suppress(FileNotFoundError):
                _write(folder / name, value.format(limit=limit_bytes, processes=processes))

    def remove_leftovers(self) -> None:
        """Remove the groups of processes that have ended without removing them."""
        with suppress(OSError):
            for folder in sorted(self.folder.glob(f"{_PREFIX}-*")):
                found = _NAME.fullmatch(folder.name)
                if found is not None and not _lives(*map(int, found.groups())):
                    MemoryGroup(folder, self.version).remove()


@dataclass(frozen=True, slots=True)
class FoundGroups:
    """The place for groups, or None with the reason."""

    groups: MemoryGroups | None
    reason: str = ""


@cache
def memory_groups() -> FoundGroups:
    """Return the place in which this process makes groups, tested with a real group.

    Also removes the groups that ended processes have left there.
    """
    try:
        groups = find_groups()
    except CgroupError as error:
        return FoundGroups(None, str(error))
    groups.remove_leftovers()
    return FoundGroups(groups)


def find_groups(proc: Path = Path("/proc/self")) -> MemoryGroups:
    """Return a place in which groups can be made. Raises CgroupError if there is none.

    In version 1 this is the group of this process. In version 2 a group that has processes cannot
    limit the memory of groups within it, unless it is the root. So there it is the closest
    ancestor that can, as long as this process does not leave a limit that was set for it.
    """
    try:
        memberships = _memberships((proc / "cgroup").read_text())
        mounts = _mounts((proc / "mountinfo").read_text())
    except (OSError, ValueError) as error:
        raise CgroupError(f"this kernel has no cgroups ({error})") from error
    if "memory" in memberships:
        return _tested(MemoryGroups(_folder(mounts, memberships, "memory"), 1))
    if "" not in memberships:
        raise CgroupError("this kernel has no memory cgroups")
    own = _folder(mounts, memberships, "")
    top, folder = mounts[""][1], own
    while "memory" not in _words(folder / "cgroup.subtree_control"):
        for name in ("memory.max", "memory.high", "cpu.max"):
            if _words(folder / name)[:1] not in ([], ["max"]):
                raise CgroupError(
                    f"{folder} has processes, so version 2 of cgroups allows no groups with a "
                    f"memory limit within it, and a group beside it would escape its {name}"
                )
        if folder == top:
            raise CgroupError(
                f"no cgroup from {own} up to {top} has the memory controller in its "
                "cgroup.subtree_control (version 2 allows that only for groups without processes)"
            )
        folder = folder.parent
    return _tested(MemoryGroups(folder, 2))


def _tested(groups: MemoryGroups) -> MemoryGroups:
    """Return the groups if a process can join one. Raises CgroupError otherwise."""
    with groups.group(_PROBE_BYTES, 16) as group:
        try:
            tried = subprocess.run(group.joined(["true"]), capture_output=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CgroupError(f"no process can be tried in {group.folder}: {error}") from error
        group.check_joined(tried.stderr)
    if tried.returncode:
        raise CgroupError(
            f"a process in a group in {groups.folder} ended with status {tried.returncode}"
        )
    return groups


def _memberships(text: str) -> dict[str, str]:
    """Return the group's path of each controller, from /proc/self/cgroup. Version 2 is ""."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        found |= dict.fromkeys(controllers.split(","), path)
    return found


def _mounts(text: str) -> dict[str, tuple[str, Path]]:
    """Return root and mount point of each controller, from /proc/self/mountinfo."""
    found: dict[str, tuple[str, Path]] = {}
    for line in text.splitlines():
        place, _, source = line.partition(" - ")
        root, point = place.split()[3:5]
        kind, _, options = source.split()
        names = options.split(",") if kind == "cgroup" else [""] if kind == "cgroup2" else []
        for name in names:
            found.setdefault(name, (root, Path(point)))
    return found


def _folder(
    mounts: dict[str, tuple[str, Path]], memberships: dict[str, str], controller: str
) -> Path:
    """Return the folder of this process's group. Raises CgroupError if it is not mounted."""
    path = memberships[controller]
    if controller not in mounts:
        raise CgroupError("no cgroup file system with the memory controller is mounted")
    root, point = mounts[controller]
    below = path.removeprefix(root.rstrip("/"))
    if not (path.rstrip("/") + "/").startswith(root.rstrip("/") + "/") or ".." in path.split("/"):
        raise CgroupError(f"the group of this process, {path}, is outside the mounted {root}")
    return point / below.lstrip("/")


def _new_name() -> str:
    return "-".join(map(str, (_PREFIX, *_identity(os.getpid()), next(_COUNTER))))


_COUNTER = itertools.count()


@cache
def _identity(pid: int) -> tuple[int, int, int]:
    """Return PID namespace, process id and start time. The cache's key changes in forks."""
    return _namespace(), pid, _start_time(pid)


def _namespace() -> int:
    with suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return 0


def _start_time(pid: int) -> int:
    """Return the start time in the kernel's units, which tells apart reused ids; 0 if unknown."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return 0


def _lives(namespace: int, pid: int, started: int) -> bool:
    """Return whether a group's owner may still be running."""
    if namespace != _namespace():
        return True  # Processes of other PID namespaces are invisible here.
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return _start_time(pid) in (0, started)


def _kill_all(folder: Path) -> None:
    try:
        _write(folder / "cgroup.kill", "1")
    except OSError:  # version 1, or a kernel before 5.14
        for pid in _members(folder):
            with suppress(OSError):
                held = os.pidfd_open(pid)
                try:
                    # The id may have been reused since it was read.
                    if pid in _members(folder):
                        signal.pidfd_send_signal(held, signal.SIGKILL)
                finally:
                    os.close(held)


def _members(folder: Path) -> list[int]:
    """Return the processes of a group. 0 stands for processes of another PID namespace."""
    return [pid for word in _words(folder / "cgroup.procs") if (pid := int(word))]


def _words(file: Path) -> list[str]:
    with suppress(OSError):
        return file.read_text().split()
    return []


def _write(file: Path, value: str) -> None:
    """Write to a file that the kernel has made. Raises FileNotFoundError if it has not."""
    fd = os.open(file, os.O_WRONLY | os.O_TRUNC)
    try:
        os.write(fd, value.encode())
    finally:
        os.close(fd)


def _make(folder: Path) -> None:
    folder.mkdir(mode=0o755)


def _remove(folder: Path) -> None:
    folder.rmdir()
