"""`slipstream bench speculation`: its flags and its output.

It prints the grid of draft plans by batch size (`grid`), or with `--heads` a comparison of draft
heads (`heads`), or with `--bound` an upper bound for trees (`tree_bound`).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.bench.benchmark import Benchmark
from slipstream.bench.flags import (
    BENCH_MODEL,
    add_batches_flag,
    add_compute_flags,
    add_count_flag,
    add_device_flag,
    add_greedy_flag,
    device_of,
    settle_torch,
    temperature_of,
)
from slipstream.bench.printing import print_heading, progress
from slipstream.bench.record import ResultRow
from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.bench.speculation.rollout import SpeculationBench


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--plot", metavar="PNG", type=Path, help="also draw the table as a heat map"
    )
    parser.add_argument(
        "--policy",
        metavar="DIR",
        type=Path,
        default=BENCH_MODEL,
        help=f"run folder with a policy and a draft head (default: {BENCH_MODEL}, which `make "
        "bench-model` writes)",
    )
    add_batches_flag(parser, (1, 2, 4, 8, 16, 32, 64))
    add_count_flag(
        parser,
        "new-tokens",
        64,
        "tokens per response; without --heads, small batches have responses up to four times as "
        "long",
    )
    add_count_flag(
        parser, "candidates", 2048, "responses to generate; the measured ones are chosen from them"
    )
    parser.add_argument(
        "--no-selector",
        dest="selectors",
        action="store_false",
        help="measure only fixed plans: selectors need most of the time",
    )
    parser.add_argument(
        "--heads",
        metavar="DIR",
        type=Path,
        nargs="+",
        help="compare these draft heads with each other instead of plans by batch size",
    )
    parser.add_argument(
        "--bound",
        action="store_true",
        help="print, instead of the table and the selector, the best tree against the best chain "
        "by batch size, and an upper bound for the tree: the time of a chain with the same number "
        "of levels, and the policy's time for the tree's additional tokens",
    )
    parser.add_argument(
        "--plan",
        metavar="PLAN",
        nargs="+",
        help="plans to measure (default: those in docs/speculation.md; with --heads: 1_1_2 3_1_4 "
        "5_1_6 7_1_8 and the selector)",
    )
    add_greedy_flag(parser)
    add_device_flag(parser)
    add_count_flag(parser, "rounds", 5)
    add_compute_flags(parser)


def run(args: argparse.Namespace) -> list[ResultRow]:
    from slipstream.bench.speculation.rollout import SpeculationBench
    from slipstream.inference.speculation.plan import DraftPlan

    bench = SpeculationBench(
        policy=args.policy,
        temperature=temperature_of(args),
        dtype=settle_torch(args),
        rounds=args.rounds,
        device=device_of(args),
        plans=tuple(map(DraftPlan.parse, args.plan or ())),
        selectors=args.selectors,
        batches=tuple(args.batch),
        new_tokens=args.new_tokens,
        candidates=args.candidates,
    )
    if args.heads is not None:
        return _heads(args, bench)
    return _bound(args, bench) if args.bound else _grid(args, bench)


def _grid(args: argparse.Namespace, bench: SpeculationBench) -> list[ResultRow]:
    from slipstream.bench.speculation import grid

    rows = grid.run_grid(bench, progress)
    print_heading("draft plans by batch size", rows)
    print(grid.grid_table(rows), flush=True)
    if args.plot is not None:
        from slipstream.bench.speculation.heat_map import plot_grid

        print(f"  picture: {plot_grid(rows, args.plot)}")
    return rows


def _heads(args: argparse.Namespace, bench: SpeculationBench) -> list[ResultRow]:
    from slipstream.bench.speculation import heads

    if args.plot is not None or not args.selectors or args.bound:
        raise ConfigError(
            "--plot, --no-selector and --bound are for plans by batch size; leave out --heads"
        )
    rows = heads.run_heads(bench, args.heads, progress, bench.plans or heads.PLANS)
    print_heading("draft heads, interleaved", rows)
    print(heads.heads_table(rows), flush=True)
    return rows


def _bound(args: argparse.Namespace, bench: SpeculationBench) -> list[ResultRow]:
    from slipstream.bench.speculation import tree_bound

    if args.plot is not None:
        raise ConfigError("--plot draws the table of all plans; leave out --bound")
    rows = tree_bound.run_bound(bench, progress)
    print_heading("trees against chains by batch size", rows)
    print(tree_bound.bound_table(rows), flush=True)
    return rows


def summary(args: argparse.Namespace, rows: Sequence[ResultRow]) -> Mapping[str, object]:
    if not args.bound:
        return {}
    from slipstream.bench.speculation import tree_bound

    return {"trees_over_chains": tree_bound.summary(rows)}


BENCHMARK = Benchmark(add_flags=add_flags, run=run, summary=summary)
