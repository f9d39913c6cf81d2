"""Locks a scoring worker down: it can read files and compute, and nothing else.

A scorer's library computes with what a response says. If a response ever makes the library run
code, that code finds a process that cannot start programs, write files, open sockets, or reach
other processes. A seccomp filter refuses these calls with EPERM, which Python raises as
PermissionError. Threads, and imports of more libraries, still work.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
from collections.abc import Callable

from slipstream.rewards.sandbox.system_calls import (
    ALLOW,
    REFUSE,
    SANDBOX_REFUSED,
    CallRules,
    Numbers,
    any_bit_of,
    any_of,
    argument,
    filter_program,
    has_numbers,
    otherwise,
    unless_null,
)

# In addition to the calls that the sandbox refuses:
_FILES: dict[str, Numbers] = {
    # name: x86_64, aarch64
    "creat": (85, None),
    "open_by_handle_at": (304, 265),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "rmdir": (84, None),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "link": (86, None),
    "linkat": (265, 37),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "truncate": (76, 45),
    "ftruncate": (77, 46),
    "fallocate": (285, 47),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "mq_unlink": (241, 181),
    "fanotify_init": (300, 262),
}

_FILE_SYSTEMS: dict[str, Numbers] = {
    "chroot": (161, 51),
    "pivot_root": (155, 41),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "swapon": (167, 224),
    "swapoff": (168, 225),
}

_PROCESSES: dict[str, Numbers] = {
    "execve": (59, 221),
    "execveat": (322, 281),
    "fork": (57, None),
    "vfork": (58, None),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "kcmp": (312, 272),
    "setrlimit": (160, 164),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
}

_USERS: dict[str, Numbers] = {
    "setuid": (105, 146),
    "setgid": (106, 144),
    "setreuid": (113, 145),
    "setregid": (114, 143),
    "setresuid": (117, 147),
    "setresgid": (119, 149),
    "setfsuid": (122, 151),
    "setfsgid": (123, 152),
    "setgroups": (116, 159),
    "capset": (126, 91),
}

_COMMUNICATION: dict[str, Numbers] = {
    "socket": (41, 198),
    "socketpair": (53, 199),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    "sendto": (44, 206),
    "sendmsg": (46, 211),
    "sendmmsg": (307, 269),
    "setsockopt": (54, 208),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "semctl": (66, 191),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
}

_MACHINE: dict[str, Numbers] = {
    "personality": (135, 92),
    "iopl": (172, None),
    "ioperm": (173, None),
    "reboot": (169, 142),
    "acct": (163, 89),
    "vhangup": (153, 58),
    "syslog": (103, 116),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "kexec_file_load": (320, 294),
    "delete_module": (176, 106),
}

_NEWEST = 462
"""Number of the newest call that was judged here, `mseal`."""

_WRITES = 0o1 | 0o2 | 0o100 | 0o1000 | 0o20000000
"""Flags of `open`: O_WRONLY, O_RDWR, O_CREAT, O_TRUNC, and the bit that only O_TMPFILE has."""

_CLONE_THREAD = 0x10000

_IOCTLS = (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5450, 0x5451)
"""TCGETS, TCGETS2, TIOCGWINSZ, FIONREAD, FIONCLEX, FIOCLEX. Others type into terminals, or change
attributes of files that are open for reading."""

_FCNTLS = (0, 1, 2, 3, 5, 6, 7, 1030, 1032)
"""Copies of descriptors, their flags, locks, and the size of a pipe. Others send signals to other
processes, or change the standard error that the worker shares with the run."""


def worker_rules(pid: int) -> CallRules:
    """Return the rules for the worker with this process number."""
    only_itself = (argument(0), any_of((pid,), ALLOW), otherwise(REFUSE))
    return CallRules(
        refused={
            **SANDBOX_REFUSED,
            **_FILES,
            **_FILE_SYSTEMS,
            **_PROCESSES,
            **_USERS,
            **_COMMUNICATION,
            **_MACHINE,
        },
        # The arguments of these calls lie in memory, which a filter cannot read. The C library
        # knows kernels without them.
        absent={"clone3": (435, 435), "openat2": (437, 437)},
        checked={
            "open": ((2, None), (argument(1), any_bit_of(_WRITES, REFUSE), otherwise(ALLOW))),
            "openat": ((257, 56), (argument(2), any_bit_of(_WRITES, REFUSE), otherwise(ALLOW))),
            "clone": (
                (56, 220),
                (argument(0), any_bit_of(_CLONE_THREAD, ALLOW), otherwise(REFUSE)),
            ),
            "kill": ((62, 129), only_itself),
            "tkill": ((200, 130), only_itself),
            "tgkill": ((234, 131), only_itself),
            # Limits can be read but not set: root could raise its own and lower those of others.
            "prlimit64": ((302, 261), (unless_null(2, REFUSE), otherwise(ALLOW))),
            "ioctl": ((16, 29), (argument(1), any_of(_IOCTLS, ALLOW), otherwise(REFUSE))),
            "fcntl": ((72, 25), (argument(1), any_of(_FCNTLS, ALLOW), otherwise(REFUSE))),
        },
        unknown_from=_NEWEST + 1,
    )


class _Program(ctypes.Structure):
    """`struct sock_fprog` of the kernel."""

    _fields_ = (("length", ctypes.c_ushort), ("lines", ctypes.c_char_p))


_NO_NEW_PRIVILEGES = 38
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_SET_FILTER, _ALL_THREADS, _FULL_SPEED = 1, 1, 4
"""`_FULL_SPEED`: a filter does not slow down speculative execution. Kernels before 4.17 lack it."""
_LINE_BYTES = 8


def lock_down() -> str | None:
    """Refuse these calls in all threads of this process, from now on.

    Returns None, or why the process could not be locked down: the system is not Linux, its
    processor is not listed, or its kernel has no filters. The process then stays as it was, but it
    cannot gain privileges.
    """
    # The refusal would be silent, too. This saves the attempts.
    sys.dont_write_bytecode = True
    machine = platform.machine()
    if sys.platform != "linux":
        return f"{sys.platform} has no seccomp"
    if not has_numbers(machine):
        return f"the system calls of {machine} are not listed here"
    program = filter_program(worker_rules(os.getpid()), machine)
    given = _Program(len(program) // _LINE_BYTES, program)
    libc = ctypes.CDLL(None, use_errno=True)
    nothing = ctypes.c_ulong(0)
    # The kernel takes filters only from processes that cannot gain privileges.
    if libc.prctl(_NO_NEW_PRIVILEGES, ctypes.c_ulong(1), nothing, nothing, nothing):
        return f"prctl failed: {os.strerror(ctypes.get_errno())}"
    number, how = ctypes.c_long(_SECCOMP[machine]), ctypes.c_ulong(_SET_FILTER)
    for flags in (_ALL_THREADS | _FULL_SPEED, _ALL_THREADS):
        failed = libc.syscall(number, how, ctypes.c_ulong(flags), ctypes.byref(given))
        if failed >= 0 or ctypes.get_errno() != errno.EINVAL:
            break
    if failed > 0:
        return f"thread {failed} has a filter of its own"
    return f"seccomp failed: {os.strerror(ctypes.get_errno())}" if failed else None


def still_allowed(begin: Callable[[], None]) -> str:
    """Return why this worker is not locked down, or "". `slipstream doctor` calls it in one."""
    begin()
    try:
        os.close(os.open(os.devnull, os.O_WRONLY))
    except PermissionError:
        return ""
    return lock_down() or "the kernel does not apply the filter"
