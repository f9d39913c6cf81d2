"""`slipstream bench scoring`: its flags and its output."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from slipstream.bench.benchmark import Benchmark
from slipstream.bench.flags import add_count_flag
from slipstream.bench.printing import print_rows, verdict
from slipstream.bench.record import ResultRow


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_count_flag(parser, "answers", 2000, "answers of each kind")
    add_count_flag(parser, "responses", 128, "responses for the slow and for the stuck function")
    add_count_flag(parser, "rounds", 5)


def run(args: argparse.Namespace) -> list[ResultRow]:
    from slipstream.bench.scoring import ScoringBench
    from slipstream.bench.scoring import run as measure

    rows = measure(ScoringBench(answers=args.answers, responses=args.responses, rounds=args.rounds))
    print_rows("scoring", rows)
    return rows


def say(args: argparse.Namespace, rows: Sequence[ResultRow]) -> int:
    from slipstream.bench import scoring

    missed = scoring.missed(rows)
    print(
        f"  floor: {scoring.RATE_FLOOR:,.0f} answers per second (with worker processes: the speed "
        f"without them); less than {scoring.SLOW_FLOOR:g} "
        "s for responses whose function sleeps 1 s; at most "
        f"{scoring.STUCK_FLOOR:g} s after the deadline for a stuck function: {verdict(missed)}"
    )
    return 1 if missed else 0


BENCHMARK = Benchmark(add_flags=add_flags, run=run, say=say)
