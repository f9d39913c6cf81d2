"""`slipstream bench export`: its flags and its output."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from slipstream.bench.benchmark import Benchmark
from slipstream.bench.flags import add_compute_flags, add_count_flag, settle_torch
from slipstream.bench.printing import print_heading, print_values, progress
from slipstream.bench.record import ResultRow, median_of
from slipstream.config.launch import positive


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policy",
        metavar="DIR",
        type=Path,
        required=True,
        help="run folder of a policy of the Llama family and its draft head",
    )
    parser.add_argument(
        "--depth",
        metavar="N",
        type=positive,
        nargs="+",
        default=[1, 3, 5],
        help="draft tokens per chain (default: 1 3 5)",
    )
    add_count_flag(parser, "prompts", 64)
    add_count_flag(parser, "new-tokens", 64, "tokens per response")
    add_count_flag(parser, "at-once", 1, "prompts that vLLM gets at a time")
    add_compute_flags(parser)


def run(args: argparse.Namespace) -> list[ResultRow]:
    from bench import export

    bench = export.ExportBench(
        policy=args.policy,
        dtype=settle_torch(args),
        depths=tuple(args.depth),
        prompts=args.prompts,
        new_tokens=args.new_tokens,
        at_once=args.at_once,
    )
    rows = export.run(bench, progress)
    print_heading("a draft head in vLLM, greedy", rows)
    for row in rows:
        print(f"  {row.case}")
        print_values(row.values)
    return rows


def say(args: argparse.Namespace, rows: Sequence[ResultRow]) -> int:
    from bench.export import TIES, TOLERANCE, good, largest_gap, ratio_of

    furthest = max(abs(ratio_of(row) - 1) for row in rows)
    print(
        f"  tokens per verification in vLLM differ from ours by {furthest:.1%} at most (promised: "
        f"{TOLERANCE:.0%})"
    )
    same = {
        name: min(median_of(row.values[name]) for row in rows)
        for name in ("vllm_same_as_plain", "same_responses")
    }
    print(
        f"  of vLLM's responses with drafts, {same['vllm_same_as_plain']:.1%} equal those without "
        f"drafts and {same['same_responses']:.1%} equal ours; where responses first differ, the "
        "two most likely tokens are at most "
        f"{max(map(largest_gap, rows)):.2g} nats apart (promised: {TIES[rows[0].dtype]} in "
        f"{rows[0].dtype}; median over all tokens: "
        f"{median_of(rows[0].values['vllm_median_gap']):.2g})"
    )
    return 0 if good(rows) else 1


BENCHMARK = Benchmark(add_flags=add_flags, run=run, say=say)
