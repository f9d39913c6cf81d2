"""How long `slipstream --help` takes, next to a Python that does nothing. Never imports torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

from slipstream.bench.record import ResultRow, Spread, this_machine
from slipstream.bench.timing import alternate, ratio

FLOOR_SECONDS = 0.5
"""What `slipstream --help` may take."""

COMMANDS = {
    "slipstream --help": (sys.executable, "-m", "slipstream.cli", "--help"),
    "python -c pass": (sys.executable, "-c", "pass"),
}


def run(*, rounds: int = 10) -> list[ResultRow]:
    """Measure; one row per command."""
    times = alternate({name: _runner(line) for name, line in COMMANDS.items()}, rounds=rounds)
    return [
        ResultRow(
            benchmark="startup",
            case="help",
            contender=name,
            dtype="",
            threads=None,
            seconds=Spread.of(times[name].wall),
            machine=this_machine(),
            values={"times_python": ratio(times[name].wall, times["python -c pass"].wall)},
            settings={"rounds": rounds},
        )
        for name in COMMANDS
    ]


def _runner(line: tuple[str, ...]) -> Callable[[], object]:
    return lambda: subprocess.run(line, stdout=subprocess.DEVNULL, check=True)
