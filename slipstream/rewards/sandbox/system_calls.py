"""A seccomp filter of system calls that no solution of a programming task needs.

The refused calls allocate memory that the process and file limits do not count, or give a program
more access to the kernel. The filter is a classic BPF program, as `bwrap --seccomp` reads it. The
numbers are Linux system call numbers.
"""

from __future__ import annotations

import platform
import struct

from slipstream.errors import RewardError

_LOAD_WORD, _JUMP_EQUAL, _JUMP_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER_AT, _MACHINE_AT = 0, 4
"""Byte offsets in `struct seccomp_data`."""
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050001, 0x80000000
"""Return values of the filter; refused calls fail with EPERM."""
_X32 = 0x40000000
"""Numbers from here on are those of the x32 ABI, which runs on x86_64."""

_NUMBERS = {
    # name: x86_64, aarch64
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "mount": (165, 40),
    "umount2": (166, 39),
    # Without them a program cannot mount a cgroup file system either.
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    # Attributes of files in memory are memory of the kernel, up to gigabytes for one file.
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "unshare": (272, 97),
    "setns": (308, 268),
    "kexec_load": (246, 104),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "perf_event_open": (298, 241),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
}


def _argument(place: int) -> list[tuple[int, int, int, int]]:
    """Load the lower half of an argument; the upper half of an `int` does not count."""
    return [(_LOAD_WORD, 0, 0, 16 + 8 * place)]


def _any_of(values: tuple[int, ...], result: int) -> list[tuple[int, int, int, int]]:
    """Return `result` if the loaded word is one of `values`."""
    return [line for v in values for line in ((_JUMP_EQUAL, 0, 1, v), (_RETURN, 0, 0, result))]


def _otherwise(result: int) -> list[tuple[int, int, int, int]]:
    return [(_RETURN, 0, 0, result)]


_AF_UNIX = 1
_BUFFER_SIZES = (7, 8, 32, 33)
"""SO_SNDBUF, SO_RCVBUF, and the two that ignore the system's limit."""
_F_SETPIPE_SZ = 1031

_ONLY_UNIX = (_argument(0), _any_of((_AF_UNIX,), _ALLOW), _otherwise(_REFUSE))

_BY_ARGUMENTS = {
    # name: (x86_64, aarch64), checks. Sockets of other families reach the host (AF_VSOCK), or
    # hold more memory of the kernel than Unix sockets. Larger buffers hold more, too.
    "socket": ((41, 198), _ONLY_UNIX),
    "socketpair": ((53, 199), _ONLY_UNIX),
    "setsockopt": (
        (54, 208),
        (_argument(2), _any_of(_BUFFER_SIZES, _REFUSE), _otherwise(_ALLOW)),
    ),
    "fcntl": ((72, 25), (_argument(1), _any_of((_F_SETPIPE_SZ,), _REFUSE), _otherwise(_ALLOW))),
}
"""Calls that are refused for some arguments."""

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of `_NUMBERS`, and the kernel's number of the architecture."""


def call_filter(machine: str | None = None) -> bytes:
    """Return the filter for a machine, by default this one. Raises RewardError if it is unknown."""
    machine = machine or platform.machine()
    if machine not in _MACHINES:
        raise RewardError(
            f"code cannot be isolated on {machine}, because its system calls are not listed here "
            f"(known: {', '.join(_MACHINES)}); set reward_model.sandbox_fusion.url to a service"
        )
    column, audit = _MACHINES[machine]
    code = [
        (_LOAD_WORD, 0, 0, _MACHINE_AT),
        (_JUMP_EQUAL, 1, 0, audit),
        (_RETURN, 0, 0, _KILL),
        (_LOAD_WORD, 0, 0, _NUMBER_AT),
        (_JUMP_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _REFUSE),
    ]
    for numbers in _NUMBERS.values():
        code += [(_JUMP_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _REFUSE)]
    for calls, checks in _BY_ARGUMENTS.values():
        body = [line for check in checks for line in check]
        code += [(_JUMP_EQUAL, 0, len(body), calls[column]), *body]
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *line) for line in code)
