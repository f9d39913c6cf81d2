"""`slipstream bench trl`: its flags and its output. `peers_command` shares the flags."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.bench.benchmark import Benchmark
from slipstream.bench.flags import (
    QUICKSTART,
    add_compute_flags,
    add_count_flag,
    add_settings_flag,
)
from slipstream.bench.printing import print_rows, progress
from slipstream.bench.record import ResultRow

if TYPE_CHECKING:
    from bench.trl_runs import TrlBench

PRECISIONS = ("bfloat16-autocast", "bfloat16-weights", "float32")
"""The values of `trl_runs.PRECISIONS`, repeated here because that module imports torch."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policy",
        metavar="DIR",
        type=Path,
        default=QUICKSTART,
        help="run folder with an SFT policy to start from, and its draft head (default: "
        f"{QUICKSTART})",
    )
    parser.add_argument(
        "--problems",
        metavar="N",
        type=int,
        default=1024,
        help="held-out problems on which the trained policies are compared; 0: no comparison "
        "(default: 1024)",
    )
    add_run_flags(parser, steps=100)


def add_run_flags(parser: argparse.ArgumentParser, *, steps: int) -> None:
    """Flags of the runs that are compared; `trl_tools` has them too."""
    add_count_flag(
        parser,
        "steps",
        steps,
        "steps of Slipstream per round; the first three steps of every contender do not count",
    )
    add_count_flag(parser, "rounds", 3, "whole trainings of each contender, each with another seed")
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        nargs="+",
        default=[],
        help="precisions of TRL (default: float32 if ours is float32, all if ours is bfloat16)",
    )
    add_settings_flag(parser, "settings of the runs")
    add_compute_flags(parser)


def trl_bench(args: argparse.Namespace) -> TrlBench:
    """The comparison that the flags describe."""
    import torch

    from bench.trl_runs import TrlBench

    return TrlBench(
        policy=args.policy,
        steps=args.steps,
        rounds=args.rounds,
        problems=args.problems,
        dtype=None if args.dtype == "auto" else args.dtype,
        threads=args.threads or torch.get_num_threads(),
        precisions=tuple(args.precision),
        settings=tuple(args.set),
    )


def run(args: argparse.Namespace) -> list[ResultRow]:
    from bench import trl_compare

    rows = trl_compare.run(trl_bench(args), progress)
    print_rows("GRPO against TRL", rows)
    return rows


def summary(args: argparse.Namespace, rows: Sequence[ResultRow]) -> Mapping[str, object]:
    from bench import trl_compare

    return trl_compare.summary(rows)


def say(args: argparse.Namespace, rows: Sequence[ResultRow]) -> int:
    from bench import trl_compare

    found = trl_compare.summary(rows)
    speedups, not_below = trl_compare.speedups(rows), found["not_below"]
    by_name = ", ".join(f"{name} {value:.2f}x" for name, value in speedups.items())
    print(
        f"  speed over {found['fastest_peer']}, TRL's fastest: {by_name} (floor: "
        f"{trl_compare.SPEED_GOAL}x)"
    )
    if not_below is not None:
        print(f"  held-out accuracy {'reaches' if not_below else 'is BELOW'} TRL's interval")
    reached = max(speedups.values()) >= trl_compare.SPEED_GOAL and not_below is not False
    return 0 if reached else 1


BENCHMARK = Benchmark(add_flags=add_flags, run=run, summary=summary, say=say)
