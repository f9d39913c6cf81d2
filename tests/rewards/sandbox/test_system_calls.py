"""The seccomp filter, interpreted like the kernel does."""

from __future__ import annotations

import struct

import pytest

from slipstream.errors import RewardError
from slipstream.rewards.sandbox.system_calls import call_filter

ALLOWED, REFUSED, KILLED = 0x7FFF0000, 0x00050001, 0x80000000
X86_64, AARCH64, I386 = 0xC000003E, 0xC00000B7, 0x40000003


def answer(program: bytes, machine: int, number: int, *arguments: int) -> int:
    lines = list(struct.iter_unpack("=HBBI", program))
    padded = [*arguments, *[0] * 6][:6]
    data = struct.pack("=IIQ6Q", number, machine, 0, *padded)
    at, value = 0, 0
    while True:
        code, true, false, k = lines[at]
        at += 1
        if code == 0x20:
            (value,) = struct.unpack_from("=I", data, k)
        elif code == 0x15:
            at += true if value == k else false
        elif code == 0x35:
            at += true if value >= k else false
        elif code == 0x45:
            at += true if value & k else false
        else:
            assert code == 0x06
            return int(k)


@pytest.mark.parametrize(
    ("name", "machine", "listed", "allowed"),
    [
        ("x86_64", X86_64, (29, 321, 188, 189, 190), (0, 1, 9, 56, 59, 231)),
        ("aarch64", AARCH64, (194, 280, 5, 6, 7), (63, 64, 222, 220, 221)),
    ],
)
def test_listed_calls_are_refused(
    name: str, machine: int, listed: tuple[int, ...], allowed: tuple[int, ...]
) -> None:
    program = call_filter(name)
    for number in (*listed, 425, 426, 427, 428, 429, 430, 431, 432, 433, 442, 447, 463, 467):
        assert answer(program, machine, number) == REFUSED
    for number in allowed:
        assert answer(program, machine, number) == ALLOWED
    assert sum(answer(program, machine, n) == REFUSED for n in range(600)) == 39


def test_calls_of_other_architectures_kill_the_program() -> None:
    assert answer(call_filter("x86_64"), I386, 0) == KILLED


def test_x32_calls_are_refused() -> None:
    for number in (0, 29, 321):
        assert answer(call_filter("x86_64"), X86_64, 0x40000000 + number) == REFUSED


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(RewardError, match=r"cannot be isolated on riscv64.*sandbox_fusion"):
        call_filter("riscv64")


@pytest.mark.parametrize(
    ("name", "machine", "socket", "pair", "option", "control"),
    [("x86_64", X86_64, 41, 53, 54, 72), ("aarch64", AARCH64, 198, 199, 208, 25)],
)
def test_some_calls_are_refused_for_some_arguments(
    name: str, machine: int, socket: int, pair: int, option: int, control: int
) -> None:
    program = call_filter(name)
    for number in (socket, pair):
        assert answer(program, machine, number, 1, 1) == ALLOWED
        for family in (0, 2, 10, 16, 17, 29, 38, 40, 2**32 + 40):
            assert answer(program, machine, number, family, 1) == REFUSED
    for name_of_option, expected in ((2, ALLOWED), (7, REFUSED), (8, REFUSED), (32, REFUSED)):
        assert answer(program, machine, option, 3, 1, name_of_option) == expected
    assert answer(program, machine, control, 3, 1031, 1 << 20) == REFUSED
    assert answer(program, machine, control, 3, 3) == ALLOWED
