"""Seccomp filters of system calls, and the one for programs in the sandbox.

A filter is a classic BPF program, as `bwrap --seccomp` and the kernel read it. `filter_program`
writes it from rules. The rules of the sandbox refuse calls that no solution of a programming task
needs. These calls allocate memory that the process and file limits do not count, or give a program
more access to the kernel. The numbers are Linux system call numbers.
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from slipstream.errors import RewardError

_LOAD_WORD, _RETURN = 0x20, 0x06
_JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT = 0x15, 0x35, 0x45
_NUMBER_AT, _MACHINE_AT, _ARGUMENTS_AT = 0, 4, 16
"""Byte offsets in `struct seccomp_data`."""
ALLOW, REFUSE, ABSENT, _KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
"""Return values of a filter. A refused call fails with EPERM. A call that is absent fails with
ENOSYS, as on a kernel without it; the C library then uses an older call."""
_X32 = 0x40000000
"""Numbers from here on are those of the x32 ABI, which runs on x86_64."""

_Line = tuple[int, int, int, int]
"""An instruction: code, jumps if true and if false, and value."""

Numbers = tuple[int | None, int | None]
"""Number of a call on x86_64 and on aarch64; None on a machine without the call."""


@dataclass(frozen=True, slots=True)
class CallRules:
    """The calls that a filter does not allow.

    `refused`, and `absent`: by name, the numbers of calls that always fail. `checked`: by name, the
    numbers and the checks of calls that fail for some arguments. Calls from number `unknown_from`
    on are absent.
    """

    refused: Mapping[str, Numbers]
    checked: Mapping[str, tuple[Numbers, Sequence[Sequence[_Line]]]] = field(default_factory=dict)
    absent: Mapping[str, Numbers] = field(default_factory=dict)
    unknown_from: int | None = None


SANDBOX_REFUSED: dict[str, Numbers] = {
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


def argument(place: int) -> list[_Line]:
    """Load the lower half of an argument; the upper half of an `int` does not count."""
    return [(_LOAD_WORD, 0, 0, _ARGUMENTS_AT + 8 * place)]


def any_of(values: Sequence[int], result: int) -> list[_Line]:
    """Return `result` if the loaded word is one of `values`."""
    return [line for v in values for line in ((_JUMP_EQUAL, 0, 1, v), (_RETURN, 0, 0, result))]


def any_bit_of(mask: int, result: int) -> list[_Line]:
    """Return `result` if the loaded word has one of the bits of `mask`."""
    return [(_JUMP_ANY_BIT, 0, 1, mask), (_RETURN, 0, 0, result)]


def unless_null(place: int, result: int) -> list[_Line]:
    """Return `result` if an argument, a pointer, is not null."""
    low = _ARGUMENTS_AT + 8 * place
    halves = ((_LOAD_WORD, 0, 0, low), (_LOAD_WORD, 0, 0, low + 4))
    return [
        line for half in halves for line in (half, (_JUMP_EQUAL, 1, 0, 0), (_RETURN, 0, 0, result))
    ]


def otherwise(result: int) -> list[_Line]:
    """Return `result`."""
    return [(_RETURN, 0, 0, result)]


_AF_UNIX = 1
_BUFFER_SIZES = (7, 8, 32, 33)
"""SO_SNDBUF, SO_RCVBUF, and the two that ignore the system's limit."""
_F_SETPIPE_SZ = 1031

_ONLY_UNIX = (argument(0), any_of((_AF_UNIX,), ALLOW), otherwise(REFUSE))

SANDBOX = CallRules(
    SANDBOX_REFUSED,
    {
        # Sockets of other families reach the host (AF_VSOCK), or hold more memory of the kernel
        # than Unix sockets. Larger buffers hold more, too.
        "socket": ((41, 198), _ONLY_UNIX),
        "socketpair": ((53, 199), _ONLY_UNIX),
        "setsockopt": (
            (54, 208),
            (argument(2), any_of(_BUFFER_SIZES, REFUSE), otherwise(ALLOW)),
        ),
        "fcntl": ((72, 25), (argument(1), any_of((_F_SETPIPE_SZ,), REFUSE), otherwise(ALLOW))),
    },
)
"""Rules for programs in the sandbox."""

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of the numbers, and the kernel's number of the architecture."""


def has_numbers(machine: str) -> bool:
    """Return whether the numbers of a machine's system calls are known here."""
    return machine in _MACHINES


def call_filter(machine: str | None = None) -> bytes:
    """Return the sandbox's filter for a machine, by default this one.

    Raises RewardError if the machine is unknown.
    """
    machine = machine or platform.machine()
    if not has_numbers(machine):
        raise RewardError(
            f"code cannot be isolated on {machine}, because its system calls are not listed here "
            f"(known: {', '.join(_MACHINES)}); set reward_model.sandbox_fusion.url to a service"
        )
    return filter_program(SANDBOX, machine)


def filter_program(rules: CallRules, machine: str) -> bytes:
    """Return the filter of some rules for a machine whose numbers are known."""
    column, audit = _MACHINES[machine]
    code: list[_Line] = [
        (_LOAD_WORD, 0, 0, _MACHINE_AT),
        (_JUMP_EQUAL, 1, 0, audit),
        (_RETURN, 0, 0, _KILL),
        (_LOAD_WORD, 0, 0, _NUMBER_AT),
        (_JUMP_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, REFUSE),
    ]
    if rules.unknown_from is not None:
        code += [(_JUMP_AT_LEAST, 0, 1, rules.unknown_from), (_RETURN, 0, 0, ABSENT)]
    for calls, result in ((rules.refused, REFUSE), (rules.absent, ABSENT)):
        known = [number for numbers in calls.values() if (number := numbers[column]) is not None]
        code += any_of(known, result)
    for numbers, checks in rules.checked.values():
        if (number := numbers[column]) is not None:
            body = [line for check in checks for line in check]
            code += [(_JUMP_EQUAL, 0, len(body), number), *body]
    code += otherwise(ALLOW)
    return b"".join(struct.pack("=HBBI", *line) for line in code)
