"""How long `slipstream --help` takes, compared with a Python that does nothing. No torch here.

Run it as `slipstream bench startup` or `python -m bench.startup`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence

from slipstream.bench.benchmark import Benchmark
from slipstream.bench.flags import add_count_flag
from slipstream.bench.printing import print_rows
from slipstream.bench.record import ResultRow, Spread, this_machine
from slipstream.bench.timing import alternate, ratio

FLOOR_SECONDS = 0.5
"""The project promises that `slipstream --help` takes no longer than this."""

COMMANDS = {
    "slipstream --help": (sys.executable, "-m", "slipstream.cli", "--help"),
    "python -c pass": (sys.executable, "-c", "pass"),
}


def measure(*, rounds: int = 10) -> list[ResultRow]:
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


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_count_flag(parser, "rounds", 10)


def run(args: argparse.Namespace) -> list[ResultRow]:
    rows = measure(rounds=args.rounds)
    print_rows("start of the command line", rows)
    return rows


def say(args: argparse.Namespace, rows: Sequence[ResultRow]) -> int:
    print(f"  floor: `slipstream --help` within {FLOOR_SECONDS} s")
    return 0


BENCHMARK = Benchmark(add_flags=add_flags, run=run, say=say)

if __name__ == "__main__":
    from slipstream import cli

    sys.exit(cli.main(["bench", "startup", *sys.argv[1:]]))
