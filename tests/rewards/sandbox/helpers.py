"""Helpers: small limits, and a marker for tests that need isolation."""

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


def _isolation_error() -> str | None:
    try:
        list(BubblewrapSandbox().run(Program("pass"), [""]))
    except RewardError as error:
        return str(error)
    return None


ISOLATION_ERROR = _isolation_error()

isolated = pytest.mark.skipif(ISOLATION_ERROR is not None, reason=str(ISOLATION_ERROR))
"""Marker of tests that need bubblewrap."""


def run(code: str, stdin: str = "", language: str = "python") -> ProgramResult:
    """Run a program once, isolated."""
    (ran,) = BubblewrapSandbox(LIMITS).run(Program(code, language), [stdin])
    return ran
