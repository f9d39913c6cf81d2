"""RL runs as separate processes, from the policy of a run folder. Used by benchmarks of RL."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from slipstream.checkpoint.layout import policy_folder
from slipstream.errors import EngineError


def start_of(policy: Path) -> Path:
    """The policy that RL starts from: the SFT policy of the run folder, else its newest policy."""
    sft = policy / "sft"
    return policy_folder(sft if sft.is_dir() else policy).resolve()


def run_line(line: Sequence[str], say: Callable[[str], None]) -> None:
    """Run a command. If it fails, pass the end of its output to `say` and raise EngineError."""
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
    """Pass the end of a failed command's output to `say`, and raise EngineError."""
    say(output[-2000:])
    raise EngineError(f"`{' '.join(line)}` ended with status {status}; its last lines are above")
