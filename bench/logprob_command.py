"""`slipstream bench logprob`: its flags and its output."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from slipstream.bench.benchmark import Benchmark
from slipstream.bench.flags import add_count_flag, add_threads_flag
from slipstream.bench.printing import print_rows, verdict
from slipstream.bench.record import ResultRow


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_count_flag(parser, "tokens", 8192, "tokens with a log-prob")
    add_count_flag(parser, "vocab", 32_768, "size of the vocabulary")
    add_count_flag(parser, "hidden", 512, "width of the hidden states")
    add_count_flag(parser, "rounds", 5)
    parser.add_argument(
        "--keep-megabytes",
        metavar="N",
        type=int,
        default=600,
        help="MB of logits that the contender `kept` keeps for its backward pass (default: 600)",
    )
    add_threads_flag(parser)


def run(args: argparse.Namespace) -> list[ResultRow]:
    import torch

    from bench import logprob

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    bench = logprob.LogprobBench(
        tokens=args.tokens,
        vocab=args.vocab,
        hidden=args.hidden,
        keep_megabytes=args.keep_megabytes,
        rounds=args.rounds,
    )
    rows = logprob.run(bench)
    print_rows("log-probs, forward and backward", rows)
    return rows


def say(args: argparse.Namespace, rows: Sequence[ResultRow]) -> int:
    from bench import logprob

    missed = logprob.missed(rows)
    print(
        f"  floor: kept no slower than plain; {logprob.MEMORY_FLOOR:.0%} of plain's memory; "
        f"gradients within {logprob.GRADIENT_FLOOR:g}: {verdict(missed)}"
    )
    return 1 if missed else 0


BENCHMARK = Benchmark(add_flags=add_flags, run=run, say=say)
