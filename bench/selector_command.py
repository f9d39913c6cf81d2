"""`slipstream bench selector`: its flags and its output."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from slipstream.bench.benchmark import Benchmark
from slipstream.bench.flags import add_count_flag
from slipstream.bench.record import ResultRow


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace",
        metavar="FILE",
        type=Path,
        nargs="+",
        default=[],
        help="traces that runs recorded (speculative.trace=true), instead of simulated machines",
    )
    add_count_flag(parser, "seeds", 9)


def run(args: argparse.Namespace) -> list[ResultRow]:
    from bench import selector_regret

    rows = selector_regret.run(args.trace, seeds=args.seeds)
    print(
        "regret: the share of the time that the best draft plans would have saved; median over "
        f"{args.seeds} seeds"
    )
    print(selector_regret.table(rows))
    return rows


def say(args: argparse.Namespace, rows: Sequence[ResultRow]) -> int:
    from bench import selector_regret

    default = next(iter(selector_regret.SELECTORS))
    missed = selector_regret.missed(rows)
    outcome = f"missed in {', '.join(missed)}" if missed else "reached in all simulators"
    print(
        f"  floor: {default} within {selector_regret.FLOOR:.0%} of the best fixed plans, after "
        f"warm-up: {outcome}"
    )
    return 1 if missed else 0


BENCHMARK = Benchmark(add_flags=add_flags, run=run, say=say)
