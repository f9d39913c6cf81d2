"""`slipstream bench peers`: its flags and its output."""

from __future__ import annotations

import argparse
from pathlib import Path

from bench import trl_command
from slipstream.bench.benchmark import Benchmark
from slipstream.bench.flags import SHAPES, add_batches_flag, add_count_flag, settle_torch
from slipstream.bench.printing import progress
from slipstream.bench.record import ResultRow, read_rows
from slipstream.errors import ConfigError


def add_flags(parser: argparse.ArgumentParser) -> None:
    trl_command.add_flags(parser)
    parser.add_argument(
        "--from",
        dest="files",
        metavar="FILE",
        type=Path,
        nargs="+",
        default=[],
        help="make the table from files that `bench decode --json` and `bench trl --json` wrote "
        "instead of measuring",
    )
    parser.add_argument(
        "--shape",
        choices=SHAPES,
        default="d512x12",
        help="model with random weights for decoding (default: d512x12)",
    )
    add_batches_flag(parser, (1, 8, 32))
    add_count_flag(parser, "new-tokens", 128, "tokens per response in decoding")
    add_count_flag(parser, "decode-rounds", 5, "rounds of decoding")


def run(args: argparse.Namespace) -> list[ResultRow]:
    from bench import peers_table

    rows = [row for file in args.files for row in read_rows(file)] or _measure(args)
    print(peers_table.table(rows))
    return rows


def _measure(args: argparse.Namespace) -> list[ResultRow]:
    """Decoding against transformers, and against vLLM and llama.cpp if they are installed, then
    GRPO against TRL."""
    from bench import trl_compare
    from bench.trl_runs import trl_command as find_trl
    from slipstream.bench import decode
    from slipstream.bench.contenders import llama_command, vllm_command

    # An error about a missing TRL must come before the first measurement.
    find_trl()
    peers = ["hf"]
    for peer, name, find in (
        ("vllm", "vLLM", vllm_command),
        ("llamacpp", "llama.cpp", llama_command),
    ):
        try:
            find()
            peers.append(peer)
        except ConfigError as error:
            progress(f"without {name}: {error}")
    grpo = trl_command.trl_bench(args)
    bench = decode.DecodeBench(
        shape=args.shape,
        batches=tuple(args.batch),
        peers=tuple(peers),
        new_tokens=args.new_tokens,
        dtype=settle_torch(args),
        rounds=args.decode_rounds,
    )
    rows = [row for case in decode.run(bench, say=progress) for row in case]
    return [*rows, *trl_compare.run(grpo, progress)]


BENCHMARK = Benchmark(add_flags=add_flags, run=run)
