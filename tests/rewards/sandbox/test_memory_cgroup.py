"""Memory cgroups: found in made-up folders of each version, and used for real where possible."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from slipstream.rewards.sandbox import local, memory_cgroup
from slipstream.rewards.sandbox.local import BubblewrapSandbox, UnisolatedSandbox
from slipstream.rewards.sandbox.memory_cgroup import (
    CgroupError,
    MemoryGroup,
    MemoryGroups,
    find_groups,
    memory_groups,
)
from slipstream.rewards.sandbox.protocol import Program, SandboxError
from tests.rewards.sandbox.helpers import LIMITS, isolated, run

V1 = ("cgroup.procs", "tasks", "memory.limit_in_bytes", "memory.oom_control")
V2 = ("cgroup.procs", "memory.max", "memory.events", "memory.swap.max", "pids.max")


class FakeKernel:
    """Folders like those of a cgroup file system. `files`: what a new group has."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.files: tuple[str, ...] = ()
        self.refusal: int | None = None
        self.busy: Callable[[], bool] = lambda: False
        self.at_removal: dict[str, str] = {}

    def make(self, folder: Path) -> None:
        if self.refusal is not None:
            raise OSError(self.refusal, os.strerror(self.refusal))
        folder.mkdir()
        for name in self.files:
            (folder / name).touch()

    def remove(self, folder: Path) -> None:
        if not folder.exists():
            raise FileNotFoundError
        if self.busy():
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        self.at_removal = {f.name: f.read_text() for f in folder.iterdir() if f.is_file()}
        shutil.rmtree(folder)

    def group(self, path: str, **values: str) -> Path:
        """Make a group with files; `_` in their names stands for a dot."""
        folder = self.top / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in values.items():
            (folder / name.replace("_", ".", 1)).write_text(value)
        return folder

    def found(self, cgroup: str, *mounts: str) -> MemoryGroups:
        """Find groups, with the lines of /proc/self/cgroup and of /proc/self/mountinfo."""
        proc = self.top / "proc"
        proc.mkdir()
        (proc / "cgroup").write_text(cgroup)
        lines = (f"30 25 0:26 {m.format(top=self.top)}\n" for m in mounts)
        (proc / "mountinfo").write_text("".join(lines))
        return find_groups(proc)


MOUNT_1 = "/ {top}/memory rw,nosuid shared:9 - cgroup cgroup rw,memory"
MOUNT_CPU = "/ {top}/cpu rw,nosuid - cgroup cgroup rw,cpu,cpuacct"
MOUNT_2 = "/ {top}/unified rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    fake = FakeKernel(tmp_path)
    monkeypatch.setattr(memory_cgroup, "_make", fake.make)
    monkeypatch.setattr(memory_cgroup, "_remove", fake.remove)
    return fake


# Finding the place for groups.


def test_version_1_is_found_in_the_own_group(kernel: FakeKernel) -> None:
    kernel.files = (*V1, "memory.memsw.limit_in_bytes")
    own = kernel.group("memory/user/7")
    found = kernel.found("9:cpu,cpuacct:/\n4:memory:/user/7\n0::/\n", MOUNT_CPU, MOUNT_1, MOUNT_2)
    assert found == MemoryGroups(own, 1)
    # The probe was limited, joined by a process, and removed.
    limit = str(64 << 20)
    assert kernel.at_removal["memory.limit_in_bytes"] == limit
    assert kernel.at_removal["memory.memsw.limit_in_bytes"] == limit
    assert kernel.at_removal["tasks"] == "0\n"
    assert list(own.iterdir()) == []


def test_version_1_is_found_in_a_container(kernel: FakeKernel) -> None:
    kernel.files = V1
    own = kernel.group("memory")
    mount = "/docker/abc {top}/memory ro - cgroup cgroup rw,memory"
    assert kernel.found("4:memory:/docker/abc\n", mount) == MemoryGroups(own, 1)


def test_version_2_is_found_in_the_root_group(kernel: FakeKernel) -> None:
    kernel.files = V2
    own = kernel.group("unified", cgroup_subtree_control="cpu memory pids\n")
    assert kernel.found("0::/\n", MOUNT_2) == MemoryGroups(own, 2)


def test_version_2_is_found_in_an_ancestor_that_passes_the_controller_on(
    kernel: FakeKernel,
) -> None:
    kernel.files = V2
    slices = kernel.group("unified/user/app", cgroup_subtree_control="memory pids\n")
    own = {"memory_max": "max\n", "memory_high": "max\n", "cpu_max": "max 100000\n"}
    kernel.group("unified/user/app/run", cgroup_subtree_control="", pids_max="9999\n", **own)
    assert kernel.found("0::/user/app/run\n", MOUNT_2) == MemoryGroups(slices, 2)
    assert kernel.at_removal["memory.max"] == str(64 << 20)
    assert kernel.at_removal["memory.swap.max"] == "0"
    assert kernel.at_removal["pids.max"] == "16"
    assert kernel.at_removal["cgroup.procs"] == "0\n"
    assert "memory.oom.group" not in kernel.at_removal


@pytest.mark.parametrize("name", ["memory_max", "memory_high", "cpu_max"])
def test_version_2_does_not_leave_a_limit(kernel: FakeKernel, name: str) -> None:
    kernel.files = V2
    kernel.group("unified/app", cgroup_subtree_control="memory\n")
    kernel.group("unified/app/run", cgroup_subtree_control="", **{name: "1000000\n"})
    with pytest.raises(CgroupError, match=rf"app/run.*{name.replace('_', '.')}"):
        kernel.found("0::/app/run\n", MOUNT_2)


def test_version_2_without_the_memory_controller_is_refused(kernel: FakeKernel) -> None:
    kernel.group("unified", cgroup_subtree_control="hugetlb\n")
    kernel.group("unified/a/b", cgroup_subtree_control="")
    with pytest.raises(CgroupError, match=r"unified/a/b.*unified .*subtree_control"):
        kernel.found("0::/a/b\n", MOUNT_2)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
@pytest.mark.parametrize(("cgroup", "mount"), [("4:memory:/", MOUNT_1), ("0::/", MOUNT_2)])
def test_a_folder_that_cannot_be_written_is_refused(
    kernel: FakeKernel, code: int, cgroup: str, mount: str
) -> None:
    kernel.group("unified", cgroup_subtree_control="memory\n")
    kernel.refusal = code
    with pytest.raises(CgroupError, match=os.strerror(code)):
        kernel.found(cgroup, mount)


def test_a_new_group_without_the_controller_is_refused(kernel: FakeKernel) -> None:
    kernel.files = ("cgroup.procs",)
    kernel.group("unified", cgroup_subtree_control="memory\n")
    with pytest.raises(CgroupError, match=os.strerror(errno.ENOENT)):
        kernel.found("0::/\n", MOUNT_2)
    assert [f.name for f in (kernel.top / "unified").iterdir()] == ["cgroup.subtree_control"]


def test_a_group_that_no_process_can_join_is_refused(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel.files = tuple(name for name in V1 if name != "tasks")
    kernel.group("memory")
    make = kernel.make

    def with_folder(folder: Path) -> None:
        make(folder)
        (folder / "tasks").mkdir()

    monkeypatch.setattr(memory_cgroup, "_make", with_folder)
    with pytest.raises(CgroupError, match=r"could not join .*/tasks"):
        kernel.found("4:memory:/\n", MOUNT_1)


@pytest.mark.parametrize(
    ("cgroup", "mounts", "message"),
    [
        ("", (MOUNT_1,), "no memory cgroups"),
        ("9:cpu,cpuacct:/\n", (MOUNT_CPU,), "no memory cgroups"),
        ("4:memory:/\n", (MOUNT_CPU,), "mounted"),
        ("0::/\n", (MOUNT_CPU,), "mounted"),
        ("4:memory:/other\n", ("/docker {top}/memory rw - cgroup cgroup rw,memory",), "outside"),
        ("4:memory:/docker2\n", ("/docker {top}/memory rw - cgroup cgroup rw,memory",), "outside"),
        ("0::/../run\n", (MOUNT_2,), "outside"),
        ("nonsense\n", (), "no cgroups"),
    ],
)
def test_systems_without_usable_cgroups_are_refused(
    kernel: FakeKernel, cgroup: str, mounts: tuple[str, ...], message: str
) -> None:
    with pytest.raises(CgroupError, match=message):
        kernel.found(cgroup, *mounts)


def test_a_system_without_proc_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CgroupError, match="no cgroups"):
        find_groups(tmp_path / "nowhere")


def test_the_reason_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> MemoryGroups:
        raise CgroupError("read-only")

    monkeypatch.setattr(memory_cgroup, "find_groups", refuse)
    memory_groups.cache_clear()
    try:
        assert memory_groups() == memory_cgroup.FoundGroups(None, "read-only")
    finally:
        memory_groups.cache_clear()


# Groups.


@pytest.mark.parametrize(
    ("version", "name", "text", "expected"),
    [
        (1, "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n", True),
        (1, "memory.oom_control", "oom_kill_disable 0\nunder_oom 1\noom_kill 0\n", False),
        (1, "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\n", False),
        (2, "memory.events", "low 0\nhigh 0\nmax 7\noom 1\noom_kill 1\n", True),
        (2, "memory.events", "low 0\nhigh 0\nmax 7\noom 0\noom_kill 0\n", False),
        (2, "nothing", "", False),
    ],
)
def test_kills_by_the_kernel_are_seen(
    tmp_path: Path, version: int, name: str, text: str, expected: bool
) -> None:
    (tmp_path / name).write_text(text)
    assert MemoryGroup(tmp_path, version).out_of_memory() is expected


@pytest.mark.parametrize("version", [1, 2])
def test_processes_are_killed_before_the_group_is_removed(kernel: FakeKernel, version: int) -> None:
    kernel.files = {1: V1, 2: (*V2, "cgroup.kill")}[version]
    member = subprocess.Popen(["sleep", "600"])
    try:
        with MemoryGroups(kernel.top, version).group(1 << 20, 3) as group:
            (group.folder / "cgroup.procs").write_text(f"0\n{member.pid}\n")

            def busy() -> bool:
                # The kernel kills all members when it reads a "1" here.
                kill = group.folder / "cgroup.kill"
                if kill.exists() and kill.read_text() == "1":
                    member.kill()
                return member.poll() is None

            kernel.busy = busy
            assert group.members() == [member.pid]
        assert member.poll() == -signal.SIGKILL
    finally:
        member.kill()
        member.wait()
    assert list(kernel.top.iterdir()) == []


def test_a_group_whose_processes_do_not_end_is_left(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_cgroup, "_EMPTY_S", 0.01)
    kernel.files, kernel.busy = V1, lambda: True
    with MemoryGroups(kernel.top, 1).group(1 << 20, 3) as group:
        pass
    assert group.folder.exists()
    kernel.busy = lambda: False
    assert group.remove()
    assert not group.folder.exists()
    assert group.remove()


def test_only_leftovers_of_ended_processes_are_removed(kernel: FakeKernel) -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    namespace, pid, started = memory_cgroup._identity(os.getpid())
    kept = {
        f"slipstream-{namespace}-{pid}-{started}-0",
        f"slipstream-{namespace}-1-{memory_cgroup._start_time(1)}-0",
        f"slipstream-{namespace + 1}-{ended.pid}-{started}-0",  # another PID namespace
        "slipstream-runs",
        "other",
    }
    gone = {
        f"slipstream-{namespace}-{ended.pid}-{started}-0",
        f"slipstream-{namespace}-{ended.pid}-{started}-1",
        f"slipstream-{namespace}-{pid}-{started + 1}-0",  # the id has been used again
    }
    for name in kept | gone:
        kernel.group(name)
    MemoryGroups(kernel.top, 1).remove_leftovers()
    assert {folder.name for folder in kernel.top.iterdir()} == kept


# The kernel's cgroups.


def _reason() -> str:
    """Return why there are no cgroups here; empty if there are."""
    return memory_groups().reason


needs_cgroup = pytest.mark.skipif(bool(_reason()), reason=f"no memory cgroup: {_reason()}")

_FORKS = """
import os, time
for _ in range(20):
    try: child = os.fork()
    except OSError: break
    if child == 0: break
"""

_ATTACKS = {
    "files that are empty": "import os\nfor i in range(10**7): os.mkdir(str(i))",
    "mappings": _FORKS + "import mmap\nheld = []\nwhile True:\n"
    "    try: held.append(mmap.mmap(-1, 8192))\n"
    "    except OSError: time.sleep(0.1)",
    "sockets": _FORKS
    + """
import socket
held = []
try:
    while True:
        for one in socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM):
            held.append(one)
            one.setblocking(False)
            try:
                while True: one.send(bytes(4096))
            except OSError: pass
except OSError: pass
time.sleep(60)
""",
    "faults of many processes at once": _FORKS + "x = b'x' * 60_000_000\ntime.sleep(60)",
}


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Peak usage and limit of each group in bytes, noted when it is removed."""
    found: list[tuple[int, int]] = []
    remove = MemoryGroup.remove
    names = {
        1: ("memory.max_usage_in_bytes", "memory.limit_in_bytes"),
        2: ("memory.peak", "memory.max"),
    }

    def noting(self: MemoryGroup) -> bool:
        peak, limit = (self.folder / name for name in names[self.version])
        if peak.exists():
            found.append((int(peak.read_text()), int(limit.read_text())))
        return remove(self)

    monkeypatch.setattr(MemoryGroup, "remove", noting)
    return found


@needs_cgroup
@isolated
@pytest.mark.parametrize("name", _ATTACKS)
def test_all_memory_of_a_program_is_limited(name: str, peaks: list[tuple[int, int]]) -> None:
    limits = replace(LIMITS, run_timeout_s=20.0, memory_mb=128)
    (ran,) = BubblewrapSandbox(limits).run(Program(_ATTACKS[name]), [""])
    assert ran.verdict == "memory"
    peak, limit = peaks[-1]
    # The memory, the files, and what the sandbox needs itself; the kernel counts whole pages.
    own = limits.processes // 2 + 16
    wanted = (limits.memory_mb + limits.files_mb + own << 20) + len(_ATTACKS[name])
    assert wanted - 4096 < limit <= wanted
    assert limits.memory_mb << 20 < peak <= limit
    assert _own_groups() == []


@needs_cgroup
@isolated
@pytest.mark.parametrize("code", ["print('done')", "while True: pass", "import os; os.abort()"])
def test_groups_are_removed_after_a_run(code: str) -> None:
    run(code)
    assert _own_groups() == []


@needs_cgroup
def test_processes_that_left_their_session_are_killed_without_isolation() -> None:
    code = (
        "import os, time\nif os.fork() == 0:\n    os.setsid(); time.sleep(600)\nprint(os.getpid())"
    )
    (ran,) = UnisolatedSandbox(LIMITS).run(Program(code), [""])
    assert ran.verdict in ("ok", "time")
    assert _own_groups() == []


@needs_cgroup
@isolated
def test_a_sandbox_without_cgroups_makes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryGroups, "group", None)
    (ran,) = BubblewrapSandbox(LIMITS, cgroups=False).run(Program("print(1)"), [""])
    assert ran.stdout == "1\n"


def test_programs_without_a_cgroup_are_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    none = memory_cgroup.FoundGroups(None, "read-only")
    monkeypatch.setattr(local, "memory_groups", lambda: none)
    local._warn_without_cgroups.cache_clear()
    for sandbox in (UnisolatedSandbox(LIMITS, cgroups=False), *[UnisolatedSandbox(LIMITS)] * 2):
        (ran,) = sandbox.run(Program("print(1)"), [""])
        assert ran.stdout == "1\n"
    local._warn_without_cgroups.cache_clear()
    (message,) = caplog.messages
    assert "read-only" in message
    assert memory_cgroup.REMEDY in message


@needs_cgroup
@isolated
def test_a_group_that_cannot_be_made_is_an_error_of_the_sandbox(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(folder: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(memory_cgroup, "_make", full)
    with pytest.raises(SandboxError, match=r"cgroup.*No space left"):
        run("print(1)")


@needs_cgroup
def test_groups_of_killed_processes_are_removed_later() -> None:
    """The owner of a group, which has a process, is killed."""
    code = """
import os, signal, subprocess
from slipstream.rewards.sandbox.memory_cgroup import find_groups
with find_groups().group(1 << 26, 9) as group:
    child = subprocess.Popen(group.joined(["sleep", "600"]), stdout=subprocess.DEVNULL)
    while child.pid not in group.members(): pass
    print(group.folder, child.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    owner = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=60
    )
    assert owner.returncode == -signal.SIGKILL
    folder, child = owner.stdout.split()
    assert Path(folder).exists()
    assert psutil.pid_exists(int(child))
    groups = memory_groups().groups
    assert groups is not None
    groups.remove_leftovers()
    assert not Path(folder).exists()
    # What remains of it is a zombie at most, until the system collects it.
    with suppress(psutil.NoSuchProcess):
        assert psutil.Process(int(child)).status() == psutil.STATUS_ZOMBIE


def _own_groups() -> list[str]:
    groups = memory_groups().groups
    assert groups is not None
    return [f.name for f in groups.folder.glob(f"slipstream-*-{os.getpid()}-*")]
