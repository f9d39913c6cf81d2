"""`slipstream bench lossless`: its flags and its output."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.bench.benchmark import Benchmark
from slipstream.bench.flags import (
    RANDOM_SHAPES,
    SHAPES,
    add_compute_flags,
    add_count_flag,
    settle_torch,
)
from slipstream.bench.printing import print_rows, progress
from slipstream.bench.record import ResultRow
from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.bench.lossless.targets import Target


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_count_flag(
        parser,
        "tokens",
        240_000,
        "compare at least this number of tokens, over all models and draft proposers",
    )
    parser.add_argument(
        "--shape",
        choices=SHAPES,
        nargs="*",
        default=RANDOM_SHAPES,
        help=f"models with random weights (default: {' '.join(RANDOM_SHAPES)}); may be empty",
    )
    parser.add_argument(
        "--policy",
        metavar="DIR",
        type=Path,
        help="also check a trained model: a run folder (with its draft head), or a Hugging Face "
        "folder",
    )
    parser.add_argument(
        "--head",
        metavar="DIR",
        type=Path,
        help="draft head for --policy (default: the run's; if it has none, one is trained)",
    )
    add_compute_flags(parser)


def run(args: argparse.Namespace) -> list[ResultRow]:
    from slipstream.bench.lossless import check
    from slipstream.bench.lossless.targets import random_target, trained_target
    from slipstream.bench.lossless.workloads import PROPOSERS, LosslessBench

    dtype = settle_torch(args)
    if args.head is not None and args.policy is None:
        raise ConfigError("--head is the draft head of a trained policy; add --policy DIR")
    makers: dict[str, Callable[[], Target]] = {}
    if args.policy is not None:
        # First, so that an error in its files shows at once.
        makers["policy"] = partial(trained_target, args.policy, args.head)
    makers |= {shape: partial(random_target, shape) for shape in args.shape}
    if not makers:
        raise ConfigError("no model to check: give a name to --shape, or add --policy DIR")
    # The widest model has a large vocabulary: one of its tokens costs the time of several others.
    weights = {name: 1 if name == "d512x12" else 4 for name in makers}
    rows = []
    for name, make in makers.items():
        progress(f"{name}: making the policy and its draft head")
        share = args.tokens * weights[name] / sum(weights.values())
        tokens = math.ceil(share / len(PROPOSERS))
        measured = check.run(LosslessBench(target=make(), tokens=tokens, dtype=dtype), progress)
        print_rows(f"speculation against plain decoding, {name}", measured)
        rows += measured
    return rows


def summary(args: argparse.Namespace, rows: Sequence[ResultRow]) -> Mapping[str, object]:
    from slipstream.bench.lossless import check

    return check.counts(rows)


def say(args: argparse.Namespace, rows: Sequence[ResultRow]) -> int:
    from slipstream.bench.lossless.check import different, total

    found = different(rows)
    print(
        f"\n{total(rows, 'tokens'):,} tokens compared; {total(rows, 'accepted'):,} of them from "
        f"accepted drafts, of which {total(rows, 'siblings'):,} were not the first draft at their "
        f"position; {found:,} differ in id or log-probs"
    )
    return 1 if found else 0


BENCHMARK = Benchmark(add_flags=add_flags, run=run, summary=summary, say=say)
