"""Harmful programs are contained by the real bubblewrap.

A program prints a line that starts with BROKEN for each attempt that succeeded. Programs that never
end are stopped.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from slipstream.rewards.sandbox.local import BubblewrapSandbox
from slipstream.rewards.sandbox.protocol import Program
from tests.rewards.sandbox.helpers import LIMITS, as_user, isolated, run

pytestmark = isolated

_PRELUDE = """
import ctypes, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
def held(what, *wanted):
    try:
        came = what()
    except wanted or OSError as error:
        print("held", type(error).__name__)
    else:
        print("BROKEN", came)
def call(*arguments):
    came = libc.syscall(*arguments)
    if came < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return came
"""


def attack(code: str, held: int = 1) -> str:
    """Run an attack whose attempts must all fail, and return its output."""
    ran = run(_PRELUDE + code)
    assert ran.verdict == "ok", ran
    assert "BROKEN" not in ran.stdout
    assert ran.stdout.count("held") == held, ran
    return ran.stdout


# Programs that never end.


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time; time.sleep(1000)",
        "import signal\nfor s in range(1, 65):\n"
        "    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError): pass\n"
        "while True: pass",
        "import os, time; os.close(1); os.close(2); time.sleep(1000)",
        # The children do not fork, so that a broken limit does not bring down the machine.
        "import os, time\nwhile True:\n    try: pid = os.fork()\n    except OSError: pid = 1\n"
        "    if pid == 0: time.sleep(1000)",
        "import os, sys\nos.execv(sys.executable, [sys.executable, '-I', '/box/main.py'])",
        "import threading\nthreading.Event().wait()",
        "10 ** 10 ** 10",
        "import re\nre.match('(a+)+$', 'a' * 40 + 'b')",
    ],
    ids=[
        "computes",
        "sleeps",
        "ignores signals",
        "closes its output",
        "forks",
        "starts itself again",
        "waits",
        "one long operation",
        "regular expression",
    ],
)
def test_endless_programs_are_stopped(code: str) -> None:
    ran = run(code)
    assert ran.verdict in ("time", "failed")
    assert ran.verdict == "time" or "MemoryError" in ran.stderr


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_endless_output_is_stopped(stream: str) -> None:
    ran = run(f"import sys\nwhile True: sys.{stream}.write('x' * 1000)")
    assert ran.verdict == "output"
    assert len(ran.stdout) + len(ran.stderr) <= LIMITS.output_kb * 1024 + (1 << 17)


# Processes and memory.


def test_forks_are_limited() -> None:
    ran = run("""
import os, time
n = 0
try:
    while n < 500:
        if os.fork() == 0:
            time.sleep(30); os._exit(0)
        n += 1
except OSError as error:
    print(n, error.errno)
""")
    count, errno = map(int, ran.stdout.split())
    assert 0 < count < LIMITS.processes
    assert errno == 11


def test_threads_are_limited() -> None:
    ran = run("""
import threading, time
n = 0
try:
    while n < 500:
        threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
        n += 1
except RuntimeError:
    print(n)
""")
    assert 0 < int(ran.stdout) < LIMITS.processes


def test_memory_of_one_process_is_limited() -> None:
    ran = run("x = bytearray(10**9)")
    assert ran.verdict == "failed"
    assert "MemoryError" in ran.stderr


def test_total_memory_of_processes_is_limited() -> None:
    ran = run("""
import os, time
for _ in range(8):
    if os.fork() == 0:
        x = bytearray(100_000_000)
        time.sleep(30)
time.sleep(30)
""")
    assert ran.verdict == "memory"


def test_uncounted_shared_memory_is_refused() -> None:
    numbers = {"x86_64": (29, 319), "aarch64": (194, 279)}[os.uname().machine]
    attack(
        f"held(lambda: call({numbers[0]}, 0, 10**8, 0o1600))\n"
        f"held(lambda: call({numbers[1]}, b'x', 0))",
        held=2,
    )


def test_uncounted_attributes_of_files_are_refused() -> None:
    numbers = {"x86_64": (188, 189, 190), "aarch64": (5, 6, 7)}[os.uname().machine]
    attack(
        f"""
for number in {numbers}:
    fd = os.open("/box/file", os.O_RDWR | os.O_CREAT)
    file = fd if number == {numbers[2]} else b"/box/file"
    held(lambda: call(number, file, b"user.x", b"x" * 60_000, 60_000, 0))
""",
        held=3,
    )


def test_cgroups_are_out_of_reach() -> None:
    """A program can neither see the files of its cgroup, nor mount them, nor move itself."""
    folders = ["/sys", "/sys/fs/cgroup", "/proc/1/root/sys", "/proc/self/cwd/../sys"]
    attack(
        "".join(f"held(lambda: os.listdir({folder!r}))\n" for folder in folders)
        + """
for line in open("/proc/self/cgroup"):
    if line.strip().split(":", 2)[2] != "/":
        print("BROKEN", line)
for line in open("/proc/self/mountinfo"):
    if " - cgroup" in line:
        print("BROKEN", line)
mount, unshare, setns = {"x86_64": (165, 272, 308), "aarch64": (40, 97, 268)}[os.uname().machine]
os.mkdir("/box/cgroup")
for kind in (b"cgroup", b"cgroup2"):
    held(lambda: call(mount, kind, b"/box/cgroup", kind, 0, b"memory"))
    held(lambda: call(430, kind, 0))  # fsopen
held(lambda: call(428, -100, b"/", 1))  # open_tree
held(lambda: call(429, -100, b"/usr", -100, b"/box/cgroup", 0))  # move_mount
held(lambda: call(442, -100, b"/usr", 0, 0, 0))  # mount_setattr
for flags in (0x02000000, 0x10000000, 0x00020000):  # new cgroup, user and mount namespaces
    held(lambda: call(unshare, flags))
held(lambda: os.open("/proc/1/ns/cgroup", os.O_RDONLY) and call(setns, 3, 0))
# A clone into a cgroup, by each file that could be one, and clones with new namespaces.
def clone(flags, cgroup=0):
    arguments = (ctypes.c_uint64 * 11)(flags, 0, 0, 0, 17, 0, 0, 0, 0, 0, cgroup)
    return call(435, arguments, ctypes.sizeof(arguments))
for fd in range(64):
    held(lambda: clone(0x200000000, fd))
for flags in (0x02000000, 0x10000000, 0x00020000):
    held(lambda: clone(flags))
""",
        held=4 + 4 + 3 + 3 + 1 + 64 + 3,
    )


def test_limits_cannot_be_raised() -> None:
    attack(
        """
import resource as r
for kind in (r.RLIMIT_NPROC, r.RLIMIT_AS, r.RLIMIT_FSIZE, r.RLIMIT_CPU, r.RLIMIT_CORE):
    held(lambda: r.setrlimit(kind, (r.RLIM_INFINITY, r.RLIM_INFINITY)), ValueError, OSError)
""",
        held=5,
    )


def test_no_process_remains() -> None:
    mark = f"slipstream-mark-{os.getpid()}"
    ran = run(f"""
import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", {mark!r}])
    os._exit(0)
print("gone")
""")
    assert ran.verdict == "ok"
    assert ran.seconds < 1.0
    time.sleep(0.1)
    left = [p.info["cmdline"] for p in psutil.process_iter(["cmdline"])]
    assert not any(mark in line for command in left for line in command or [])


def test_a_child_that_keeps_the_output_open_does_not_block() -> None:
    ran = run("import os, time\nif os.fork() == 0: time.sleep(600)\nprint('done')")
    assert (ran.verdict, ran.stdout) == ("ok", "done\n")


# Files.


def test_size_of_one_file_is_limited() -> None:
    ran = run("""
n = 0
try:
    with open("big", "wb", buffering=0) as f:
        while True:
            n += f.write(b"x" * 2**20)
except OSError as error:
    print(n)
""")
    assert 0 < int(ran.stdout) <= LIMITS.files_mb << 20


def test_total_size_of_files_is_limited() -> None:
    ran = run("""
n = 0
try:
    for i in range(10_000):
        with open(f"/box/{i}", "wb", buffering=0) as f:
            n += f.write(b"x" * 2**20)
except OSError as error:
    print(n)
""")
    assert 0 < int(ran.stdout) <= LIMITS.files_mb << 20


def test_number_of_files_is_limited() -> None:
    ran = run("""
import os
try:
    for i in range(10**7):
        os.mkdir(str(i))
except OSError:
    print(i)
""")
    # Inodes are memory of the kernel, which a cgroup limits.
    assert ran.verdict in ("time", "memory") or int(ran.stdout) > 0


def test_memory_of_empty_files_is_limited_without_cgroups() -> None:
    limits = replace(LIMITS, memory_mb=64, run_timeout_s=20.0)
    code = "import os\nfor i in range(10**7): os.mkdir(str(i))"
    (ran,) = BubblewrapSandbox(limits, cgroups=False).run(Program(code), [""])
    assert ran.verdict == "memory"


def test_user_files_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("my secret")
    places = [Path.home(), Path(__file__), tmp_path / "secret", Path("/etc/passwd"), Path("/root")]
    attack("".join(f"held(lambda: os.stat({str(p)!r}))\n" for p in places), held=len(places))


def test_only_system_folders_are_visible() -> None:
    assert eval(run("import os; print(sorted(os.listdir('/')))").stdout) == sorted(
        {"box", "dev", "proc", "usr"}
        | {
            f.removeprefix("/")
            for f in ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
            if Path(f).exists()
        }
        | (
            {"etc"}
            if Path("/etc/alternatives").exists() or Path("/etc/ld.so.cache").exists()
            else set()
        )
    )


def test_system_folders_cannot_be_written() -> None:
    places = [
        "/usr/x",
        "/x",
        "/dev/x",
        "/etc/x",
        "/proc/sys/kernel/hostname",
        "/proc/sys/kernel/core_pattern",
    ]
    attack("".join(f"held(lambda: open({p!r}, 'w').write('0'))\n" for p in places), held=6)


def test_standard_input_cannot_be_written() -> None:
    attack("held(lambda: os.write(0, b'x'))\nheld(lambda: os.ftruncate(0, 10**6))", 2)


def test_the_source_file_cannot_be_changed() -> None:
    attack("held(lambda: open('/box/main.py', 'w'))\nheld(lambda: os.unlink('/box/main.py'))", 2)


def test_links_out_of_the_folder_do_not_work() -> None:
    attack(f"os.symlink({str(Path(__file__))!r}, 'out')\nheld(lambda: open('out').read())")


def test_devices_cannot_be_opened_or_created() -> None:
    attack(
        """
import stat
held(lambda: os.mknod("/box/mem", stat.S_IFCHR | 0o666, os.makedev(1, 1)))
for name in ("/dev/mem", "/dev/kmem", "/dev/sda", "/dev/vda", "/dev/kvm", "/dev/fuse"):
    held(lambda: open(name, "rb"))
""",
        held=7,
    )


def test_mounts_and_chroot_are_refused() -> None:
    attack(
        """
mount = {"x86_64": 165, "aarch64": 40}[os.uname().machine]
held(lambda: call(mount, b"x", b"/box", b"tmpfs", 0, 0))
held(lambda: os.chroot("/box"))
held(lambda: call({"x86_64": 166, "aarch64": 39}[os.uname().machine], b"/usr", 2))
""",
        held=3,
    )


def test_open_files_of_the_caller_are_not_inherited() -> None:
    with open(__file__) as secret:
        os.set_inheritable(secret.fileno(), True)
        ran = run("import os; print(sorted(map(int, os.listdir('/proc/self/fd'))))")
    # The fourth descriptor belongs to the listing itself.
    assert ran.stdout == "[0, 1, 2, 3]\n"


# The rest of the machine.


def test_environment_variables_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_SECRET", "my secret")
    names = eval(run("import os; print(sorted(os.environ))").stdout)
    assert "SLIPSTREAM_SECRET" not in names
    assert set(names) >= {"HOME", "PATH"}


def test_the_network_is_unreachable() -> None:
    attack(
        """
held(lambda: socket.create_connection(("192.0.2.1", 80), timeout=1))
held(lambda: socket.create_connection(("2001:db8::1", 80), timeout=1))
held(lambda: socket.getaddrinfo("example.org", 80))
held(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3))
""",
        held=4,
    )


def test_local_services_are_unreachable() -> None:
    name = f"\0slipstream-{os.getpid()}"
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as unix,
    ):
        unix.bind(name)
        unix.listen()
        attack(
            f"""
held(lambda: socket.create_connection(("127.0.0.1", {tcp.getsockname()[1]}), timeout=1))
held(lambda: socket.socket(socket.AF_UNIX).connect({name!r}))
""",
            held=2,
        )


def test_other_processes_are_invisible_and_safe() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as other:
        attack(f"held(lambda: os.kill({other.pid}, 9))" if other.pid > 50 else "print('held')")
        assert run("import os; print(sum(p.isdigit() for p in os.listdir('/proc')))").stdout in (
            "2\n",
            "3\n",
        )
        run("import os; os.kill(-1, 9)")
        assert other.poll() is None
        other.kill()


def test_all_processes_in_the_box_have_its_limits() -> None:
    attack(
        """
import re
for pid in (1, os.getpid()):
    limits = open("/proc/%d/limits" % pid).read()
    for name, value in (("processes", 16), ("open files", 64), ("address space", 256 << 20)):
        found = re.search("Max %s +([0-9]+|unlimited) +([0-9]+|unlimited)" % name, limits)
        print("held" if found[1] == found[2] == str(value) else "BROKEN " + found[0])
""",
        held=6,
    )


def test_memory_of_processes_cannot_be_written() -> None:
    attack(
        """
for pid in (1, os.getpid()):
    held(lambda: os.open("/proc/%d/mem" % pid, os.O_RDWR))
for name in ("oom_score_adj", "coredump_filter", "timerslack_ns", "clear_refs", "comm"):
    held(lambda: open("/proc/self/" + name, "w"))
""",
        held=7,
    )


def test_sockets_reach_only_the_box() -> None:
    attack(
        """
for family in range(2, 50):
    held(lambda: socket.socket(family, socket.SOCK_STREAM))
    held(lambda: socket.socket(family, socket.SOCK_DGRAM))
a, b = socket.socketpair()
b.sendall(b"within")
print(a.recv(6) == b"within" and "held")
""",
        held=97,
    )


def test_memory_in_sockets_and_pipes_is_limited() -> None:
    """Each process fills all sockets that it may open. The total is measured from outside."""
    ran = run(
        """
import fcntl, os, socket
for size in (socket.SO_SNDBUF, socket.SO_RCVBUF):
    try: socket.socket(socket.AF_UNIX).setsockopt(socket.SOL_SOCKET, size, 1 << 22); print("BROKEN")
    except PermissionError: print("held")
r, w = os.pipe()
try: fcntl.fcntl(w, 1031, 1 << 20); print("BROKEN")
except PermissionError: print("held")
held, total = [], 0
while True:
    try: pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    except OSError: break
    held.append(pair)
    for one in pair:
        one.setblocking(False)
        try:
            while True: total += one.send(bytes(4096))
        except OSError: pass
print(total)
"""
    )
    *attempts, total = ran.stdout.split()
    assert attempts == ["held"] * 3
    # 16 processes with this much are at most 16 * 14 MB.
    assert 0 < int(total) <= 14 << 20


def test_the_supervising_process_is_protected() -> None:
    numbers = {"x86_64": (101, 310), "aarch64": (117, 270)}[os.uname().machine]
    attack(
        f"""
held(lambda: call({numbers[0]}, 16, 1, 0, 0))
held(lambda: call({numbers[1]}, 1, 0, 0, 0, 0, 0))
held(lambda: open("/proc/1/mem", "rb").read(1))
""",
        held=3,
    )


def test_the_user_cannot_be_changed() -> None:
    attack(
        """
held(lambda: os.setuid(0) if os.getuid() else os.setuid(1))
held(lambda: os.setgroups([0]))
held(lambda: call({"x86_64": 272, "aarch64": 97}[os.uname().machine], 0x10000000))
""",
        held=3,
    )


def test_kernel_interfaces_are_refused() -> None:
    attack(
        """
of = {"x86_64": (250, 248, 321, 298, 425), "aarch64": (219, 217, 280, 241, 425)}
for number in of[os.uname().machine]:
    held(lambda: call(number, 0, 0, 0, 0, 0))
""",
        held=5,
    )


def test_the_terminal_cannot_be_opened() -> None:
    attack("held(lambda: open('/dev/tty', 'w'))")


def test_a_program_cannot_fake_its_exit_status() -> None:
    ran = run("""
import os
for fd in range(3, 50):
    try: os.write(fd, b'{"exit-code": 0}\\n')
    except OSError: pass
raise SystemExit(3)
""")
    assert ran.verdict == "failed"


def test_crashes_are_failures_and_invalid_utf8_is_accepted() -> None:
    assert run("import ctypes; ctypes.string_at(0)").verdict == "failed"
    assert run("import os; os.write(1, bytes(range(256)))").verdict == "ok"
    assert run("import os; os.kill(os.getpid(), 9)").verdict == "failed"


# Source text that attacks the compiler.


@pytest.mark.parametrize(
    "code",
    [
        '#include "/dev/zero"\nint main() {}',
        '#include "/etc/passwd"\nint main() {}',
        '#include "main.c"\nint main() {}',
        "int x[1 << 30] = {1}; int main() {}",
    ],
    ids=["zeros", "passwords", "itself", "a huge program"],
)
def test_attacks_on_the_compiler_fail_to_compile(code: str) -> None:
    ran = run(code, language="c")
    assert ran.verdict == "compile"
    assert "root:" not in ran.stderr


# The same as an ordinary user, whose programs run as that user.


@pytest.mark.skipif(os.getuid() != 0, reason="the tests run as an ordinary user already")
@pytest.mark.parametrize(
    "attempt",
    [
        test_forks_are_limited,
        test_total_memory_of_processes_is_limited,
        test_memory_of_empty_files_is_limited_without_cgroups,
        test_memory_in_sockets_and_pipes_is_limited,
        test_uncounted_attributes_of_files_are_refused,
        test_cgroups_are_out_of_reach,
        test_limits_cannot_be_raised,
        test_mounts_and_chroot_are_refused,
        test_local_services_are_unreachable,
        test_all_processes_in_the_box_have_its_limits,
        test_memory_of_processes_cannot_be_written,
        test_sockets_reach_only_the_box,
        test_the_supervising_process_is_protected,
        test_the_user_cannot_be_changed,
    ],
)
def test_the_strongest_attacks_fail_as_an_ordinary_user(attempt: Callable[[], None]) -> None:
    as_user(attempt)


@pytest.mark.skipif(os.getuid() != 0, reason="the tests run as an ordinary user already")
def test_files_and_processes_of_an_ordinary_user_are_safe() -> None:
    def attempt() -> None:
        with (
            tempfile.NamedTemporaryFile("w", suffix=".secret") as secret,
            subprocess.Popen(["sleep", "60"]) as other,
        ):
            secret.write("my secret")
            secret.flush()
            paths = [secret.name, f"/proc/{os.getpid()}/root{secret.name}", f"/proc/{other.pid}"]
            attack(
                "".join(f"held(lambda: os.stat({path!r}))\n" for path in paths)
                + f"print(os.getuid() == {os.getuid()} and 'held')\n"
                "try: os.kill(-1, 9)\nexcept OSError as error: print('held', error)",
                held=5,
            )
            assert other.poll() is None
            other.kill()

    as_user(attempt)
