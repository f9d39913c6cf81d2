"""RL runs as processes of their own, from the policy of a run folder. Used by benchmarks of RL."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from slipstream.checkpoint.layout import policy_folder
from slipstream.errors import EngineError


def start_of(policy: Path) -> Path:
    """Where RL began in the run folder `policy`, or might."""
    sft = policy / "sft"
    return policy_folder(sft if sft.is_dir() else policy).resolve()


def run_line(line: Sequence[str], say: Callable[[str], None]) -> None:
    """Run a command, and hand on what it says at its end if it fails. Raises EngineError then."""
    with subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        output = process.stdout.read()
    if process.returncode:
        say_failed(line[2:], process.returncode, output, say)


def say_failed(
    line: Sequence[str], status: int, output: str, say: Callable[[str], None]
) -> NoReturn:
    """Hand on the last of what a command has said, and raise EngineError."""
    say(output[-2000:])
    raise EngineError(f"`{' '.join(line)}` ended with status {status}; its last lines are above")
