"""Programs that would do harm, in the real bubblewrap. Each says what it could do by a line that
begins with BROKEN; those that never end are stopped."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.rewards.sandbox.helpers import LIMITS, isolated, run

pytestmark = isolated

_TRIED = """
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
    """What an attack printed, all of whose attempts must have failed."""
    ran = run(_TRIED + code)
    assert ran.verdict == "ok", ran
    assert "BROKEN" not in ran.stdout
    assert ran.stdout.count("held") == held, ran
    return ran.stdout


# What never ends.


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time; time.sleep(1000)",
        "import signal\nfor s in range(1, 65):\n"
        "    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError): pass\n"
        "while True: pass",
        "import os, time; os.close(1); os.close(2); time.sleep(1000)",
        # Its children do not fork: with the limit broken they would take the machine with them.
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
def test_what_never_ends_is_stopped_in_time(code: str) -> None:
    ran = run(code)
    assert ran.verdict in ("time", "failed")
    assert ran.verdict == "time" or "MemoryError" in ran.stderr


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_prints_without_end(stream: str) -> None:
    ran = run(f"import sys\nwhile True: sys.{stream}.write('x' * 1000)")
    assert ran.verdict == "output"
    assert len(ran.stdout) + len(ran.stderr) <= LIMITS.output_kb * 1024 + (1 << 17)


# Processes and memory.


def test_forks_without_end_and_gets_no_more_than_its_processes() -> None:
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


def test_threads_without_end() -> None:
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


def test_memory_of_one_process() -> None:
    ran = run("x = bytearray(10**9)")
    assert ran.verdict == "failed"
    assert "MemoryError" in ran.stderr


def test_memory_of_many_processes_together() -> None:
    ran = run("""
import os, time
for _ in range(8):
    if os.fork() == 0:
        x = bytearray(100_000_000)
        time.sleep(30)
time.sleep(30)
""")
    assert ran.verdict == "memory"


def test_shared_memory_that_no_limit_counts() -> None:
    numbers = {"x86_64": (29, 319), "aarch64": (194, 279)}[os.uname().machine]
    attack(
        f"held(lambda: call({numbers[0]}, 0, 10**8, 0o1600))\n"
        f"held(lambda: call({numbers[1]}, b'x', 0))",
        held=2,
    )


def test_cannot_lift_its_limits() -> None:
    attack(
        """
import resource as r
for kind in (r.RLIMIT_NPROC, r.RLIMIT_AS, r.RLIMIT_FSIZE, r.RLIMIT_CPU, r.RLIMIT_CORE):
    held(lambda: r.setrlimit(kind, (r.RLIM_INFINITY, r.RLIM_INFINITY)), ValueError, OSError)
""",
        held=5,
    )


def test_leaves_no_process_behind() -> None:
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


def test_a_child_that_keeps_the_output_open_keeps_nobody_waiting() -> None:
    ran = run("import os, time\nif os.fork() == 0: time.sleep(600)\nprint('done')")
    assert (ran.verdict, ran.stdout) == ("ok", "done\n")


# Files.


def test_writes_ten_gigabytes_into_one_file() -> None:
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


def test_writes_ten_gigabytes_into_many_files() -> None:
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


def test_files_without_end() -> None:
    ran = run("""
import os
try:
    for i in range(10**7):
        os.mkdir(str(i))
except OSError:
    print(i)
""")
    assert ran.verdict == "time" or int(ran.stdout) > 0


def test_reads_the_home_folder_and_this_project(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("my secret")
    places = [Path.home(), Path(__file__), tmp_path / "secret", Path("/etc/passwd"), Path("/root")]
    attack("".join(f"held(lambda: os.stat({str(p)!r}))\n" for p in places), held=len(places))


def test_sees_only_the_systems_files() -> None:
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


def test_writes_where_the_system_is() -> None:
    places = [
        "/usr/x",
        "/x",
        "/dev/x",
        "/etc/x",
        "/proc/sys/kernel/hostname",
        "/proc/sys/kernel/core_pattern",
    ]
    attack("".join(f"held(lambda: open({p!r}, 'w').write('0'))\n" for p in places), held=6)


def test_writes_through_its_standard_input() -> None:
    attack("held(lambda: os.write(0, b'x'))\nheld(lambda: os.ftruncate(0, 10**6))", 2)


def test_changes_its_own_source() -> None:
    attack("held(lambda: open('/box/main.py', 'w'))\nheld(lambda: os.unlink('/box/main.py'))", 2)


def test_links_out_of_its_folder() -> None:
    attack(f"os.symlink({str(Path(__file__))!r}, 'out')\nheld(lambda: open('out').read())")


def test_devices() -> None:
    attack(
        """
import stat
held(lambda: os.mknod("/box/mem", stat.S_IFCHR | 0o666, os.makedev(1, 1)))
for name in ("/dev/mem", "/dev/kmem", "/dev/sda", "/dev/vda", "/dev/kvm", "/dev/fuse"):
    held(lambda: open(name, "rb"))
""",
        held=7,
    )


def test_mounts_and_other_roots() -> None:
    attack(
        """
mount = {"x86_64": 165, "aarch64": 40}[os.uname().machine]
held(lambda: call(mount, b"x", b"/box", b"tmpfs", 0, 0))
held(lambda: os.chroot("/box"))
held(lambda: call({"x86_64": 166, "aarch64": 39}[os.uname().machine], b"/usr", 2))
""",
        held=3,
    )


def test_open_files_of_the_caller() -> None:
    with open(__file__) as secret:
        os.set_inheritable(secret.fileno(), True)
        ran = run("import os; print(sorted(map(int, os.listdir('/proc/self/fd'))))")
    # The fourth is that of the listing itself.
    assert ran.stdout == "[0, 1, 2, 3]\n"


# The rest of the machine.


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_SECRET", "my secret")
    names = eval(run("import os; print(sorted(os.environ))").stdout)
    assert "SLIPSTREAM_SECRET" not in names
    assert set(names) >= {"HOME", "PATH"}


def test_network() -> None:
    attack(
        """
held(lambda: socket.create_connection(("192.0.2.1", 80), timeout=1))
held(lambda: socket.create_connection(("2001:db8::1", 80), timeout=1))
held(lambda: socket.getaddrinfo("example.org", 80))
held(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3))
""",
        held=4,
    )


def test_services_of_this_machine() -> None:
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


def test_other_processes() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as other:
        attack(f"held(lambda: os.kill({other.pid}, 9))" if other.pid > 50 else "print('held')")
        assert run("import os; print(sum(p.isdigit() for p in os.listdir('/proc')))").stdout in (
            "2\n",
            "3\n",
        )
        run("import os; os.kill(-1, 9)")
        assert other.poll() is None
        other.kill()


def test_the_process_that_watches_it() -> None:
    numbers = {"x86_64": (101, 310), "aarch64": (117, 270)}[os.uname().machine]
    attack(
        f"""
held(lambda: call({numbers[0]}, 16, 1, 0, 0))
held(lambda: call({numbers[1]}, 1, 0, 0, 0, 0, 0))
held(lambda: open("/proc/1/mem", "rb").read(1))
""",
        held=3,
    )


def test_becoming_another_user() -> None:
    attack(
        """
held(lambda: os.setuid(0) if os.getuid() else os.setuid(1))
held(lambda: os.setgroups([0]))
held(lambda: call({"x86_64": 272, "aarch64": 97}[os.uname().machine], 0x10000000))
""",
        held=3,
    )


def test_the_kernels_keys_and_programs() -> None:
    attack(
        """
of = {"x86_64": (250, 248, 321, 298, 425), "aarch64": (219, 217, 280, 241, 425)}
for number in of[os.uname().machine]:
    held(lambda: call(number, 0, 0, 0, 0, 0))
""",
        held=5,
    )


def test_the_terminal() -> None:
    attack("held(lambda: open('/dev/tty', 'w'))")


def test_says_that_it_ended_well_where_bwrap_would() -> None:
    ran = run("""
import os
for fd in range(3, 50):
    try: os.write(fd, b'{"exit-code": 0}\\n')
    except OSError: pass
raise SystemExit(3)
""")
    assert ran.verdict == "failed"


def test_crashes_and_bytes_that_are_no_text() -> None:
    assert run("import ctypes; ctypes.string_at(0)").verdict == "failed"
    assert run("import os; os.write(1, bytes(range(256)))").verdict == "ok"
    assert run("import os; os.kill(os.getpid(), 9)").verdict == "failed"


# Compilers read files, too.


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
def test_source_that_harms_the_compiler(code: str) -> None:
    ran = run(code, language="c")
    assert ran.verdict == "compile"
    assert "root:" not in ran.stderr
