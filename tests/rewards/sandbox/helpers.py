"""A sandbox with small limits, and whether this machine can isolate."""

from __future__ import annotations

import pytest

from slipstream.errors import RewardError
from slipstream.rewards.sandbox.local import BubblewrapSandbox
from slipstream.rewards.sandbox.protocol import Program, ProgramLimits, ProgramResult

LIMITS = ProgramLimits(
    run_timeout_s=1.5,
    compile_timeout_s=5.0,
    total_timeout_s=10.0,
    memory_mb=256,
    files_mb=8,
    output_kb=64,
    processes=16,
)


def _why_not() -> str | None:
    try:
        list(BubblewrapSandbox().run(Program("pass"), [""]))
    except RewardError as error:
        return str(error)
    return None


WHY_NOT = _why_not()

isolated = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
"""Of tests that need bubblewrap."""


def run(code: str, stdin: str = "", language: str = "python") -> ProgramResult:
    """One run of a program, isolated."""
    (ran,) = BubblewrapSandbox(LIMITS).run(Program(code, language), [stdin])
    return ran
