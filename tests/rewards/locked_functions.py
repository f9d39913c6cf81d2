"""What the tests of `lock_down` attempt in worker processes."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import importlib
import mmap
import os
import queue
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

_TASKS: queue.Queue[tuple[Callable[[], Any], queue.Queue[str]]] = queue.Queue()


def pretend_no_seccomp() -> None:
    """A preparation after which the worker cannot be locked down."""
    sys.platform = "darwin"


def start_thread() -> None:
    """A preparation that starts a thread, as libraries do when they are imported."""
    threading.Thread(target=_serve, daemon=True).start()


def attempt(begin: Callable[[], None], name: str, *values: str) -> str:
    """Return "done", or the name of the error number."""
    begin()
    return _outcome(lambda: ATTEMPTS[name](*values))


def attempt_in_old_thread(begin: Callable[[], None], name: str, *values: str) -> str:
    """Return the same of an attempt in the thread of `start_thread`."""
    begin()
    answer: queue.Queue[str] = queue.Queue()
    _TASKS.put((lambda: ATTEMPTS[name](*values), answer))
    return answer.get()


def _serve() -> None:
    while True:
        task, answer = _TASKS.get()
        answer.put(_outcome(task))


def _outcome(task: Callable[[], Any]) -> str:
    try:
        task()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "done"


def _call(number: int, *arguments: int) -> None:
    """Call the kernel as no library does."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments)) < 0:
        raise OSError(ctypes.get_errno(), "failed")


def _forked() -> None:
    if not os.fork():
        os._exit(0)


def _system() -> None:
    if os.system("true"):
        raise PermissionError(errno.EPERM, "failed")


def _in_thread() -> None:
    seen: list[int] = []
    threads = [threading.Thread(target=seen.append, args=(i,)) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == list(range(20))


def _import(folder: str) -> None:
    sys.path.insert(0, folder)
    assert importlib.import_module("imported_late").VALUE == 7


def _terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSTI, b"x")


def _multiprocessing() -> None:
    import multiprocessing

    multiprocessing.Process(target=print).start()


ATTEMPTS: dict[str, Callable[..., Any]] = {
    "fork": _forked,
    "spawn": lambda: os.posix_spawn("/bin/true", ["true"], {}),
    "exec": lambda: os.execv("/bin/true", ["true"]),
    "exec of a descriptor": lambda: _call(322, os.open("/bin/true", os.O_RDONLY), 0, 0, 0, 0x1000),
    "system": _system,
    "subprocess": lambda: subprocess.run(["/bin/true"], check=True),
    "multiprocessing": _multiprocessing,
    "socket": lambda: socket.socket(socket.AF_INET),
    "unix socket": lambda: socket.socket(socket.AF_UNIX),
    "vsock": lambda: socket.socket(40),
    "socket pair": socket.socketpair,
    "write": lambda path: os.open(path, os.O_WRONLY),
    "read and write": lambda path: os.open(path, os.O_RDWR),
    "truncate on open": lambda path: os.open(path, os.O_RDONLY | os.O_TRUNC),
    "create": lambda path: os.open(path + ".new", os.O_RDONLY | os.O_CREAT),
    "append": lambda path: os.open(path, os.O_WRONLY | os.O_APPEND),
    "open without a library": lambda path: _call(2, _address(path), os.O_WRONLY),
    "openat2": lambda path: _call(437, -100, _address(path), _address(path), 24),
    "temporary file": tempfile.TemporaryFile,
    "unnamed file": lambda: os.open("/tmp", os.O_TMPFILE | os.O_RDWR),
    "device": lambda: os.open("/dev/null", os.O_WRONLY),
    "own memory": lambda: os.open("/proc/self/mem", os.O_RDWR),
    "parent's memory": lambda: os.open(f"/proc/{os.getppid()}/mem", os.O_WRONLY),
    "rename": lambda path: os.rename(path, path + ".new"),
    "unlink": os.unlink,
    "mkdir": lambda path: os.mkdir(path + ".new"),
    "rmdir": lambda path: os.rmdir(os.path.dirname(path)),
    "link": lambda path: os.link(path, path + ".new"),
    "symlink": lambda path: os.symlink(path, path + ".new"),
    "fifo": lambda path: os.mkfifo(path + ".new"),
    "chmod": lambda path: os.chmod(path, 0o777),
    "chown": lambda path: os.chown(path, os.getuid(), os.getgid()),
    "truncate": lambda path: os.truncate(path, 0),
    "utime": lambda path: os.utime(path),
    "attribute": lambda path: os.setxattr(path, "user.a", b"1"),
    "kill the parent": lambda: os.kill(os.getppid(), 0),
    "kill all": lambda: os.kill(-1, 0),
    "kill the group": lambda: os.killpg(0, 0),
    "signal to a thread": lambda: _call(234, os.getppid(), os.getppid(), 0),
    "signal to another thread": lambda: _call(200, os.getppid(), 0),
    "process descriptor": lambda: os.pidfd_open(os.getppid()),
    "trace": lambda: _call(101, 16, os.getppid(), 0, 0),
    "read memory": lambda: _call(310, os.getppid(), 0, 0, 0, 0, 0),
    "limits of the parent": lambda: resource.prlimit(
        os.getppid(), resource.RLIMIT_CORE, resource.getrlimit(resource.RLIMIT_CORE)
    ),
    "own limits": lambda: _call(160, resource.RLIMIT_CORE, 0),
    "priority of the parent": lambda: os.setpriority(
        os.PRIO_PROCESS, os.getppid(), os.getpriority(os.PRIO_PROCESS, 0)
    ),
    "cores of the parent": lambda: os.sched_setaffinity(os.getppid(), os.sched_getaffinity(0)),
    "user": lambda: os.setuid(os.getuid()),
    "groups": lambda: os.setgroups([]),
    "mount": lambda: _call(165, 0, 0, 0, 0, 0),
    "root": lambda: os.chroot("/"),
    "namespace": lambda: _call(272, 0x10000000),
    "memory file": lambda: os.memfd_create("a"),
    "shared memory": lambda: _call(29, 0, 4096, 0o1600),
    "bpf": lambda: _call(321, 0, 0, 0),
    "uring": lambda: _call(425, 1, 0),
    "key": lambda: _call(250, 0, 0),
    "page faults": lambda: _call(323, 0),
    "terminal": _terminal,
    "clone3": lambda: _call(435, 0, 0),
    "a call that is not known yet": lambda: _call(463, 0, 0),
    "thread": _in_thread,
    "read": lambda path: Path(path).read_text(),
    "list": lambda path: os.listdir(os.path.dirname(path)),
    "import": _import,
    "random numbers": lambda: os.urandom(8),
    "map memory": lambda: mmap.mmap(-1, 1 << 20).close(),
    "pipe": os.pipe,
    "print": lambda: print("text", flush=True),
    "is a terminal": lambda: os.isatty(2),
    "read limits": lambda: resource.getrlimit(resource.RLIMIT_AS),
    "signal to itself": lambda: os.kill(os.getpid(), 0),
    "abort": lambda: signal.raise_signal(signal.SIGCHLD),
}


def _address(path: str) -> int:
    text = ctypes.create_string_buffer(path.encode())
    _KEPT.append(text)
    return ctypes.addressof(text)


_KEPT: list[Any] = []
