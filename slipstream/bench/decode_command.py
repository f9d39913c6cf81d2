"""`slipstream bench decode`: its flags and its output."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from slipstream.bench.benchmark import Benchmark
from slipstream.bench.flags import (
    add_batches_flag,
    add_compute_flags,
    add_count_flag,
    add_greedy_flag,
    add_model_flag,
    add_shape_flag,
    check_model,
    settle_torch,
    temperature_of,
)
from slipstream.bench.printing import print_heading, print_values, progress
from slipstream.bench.record import ResultRow
from slipstream.config.launch import positive

PEERS = ("hf", "vllm", "llamacpp")
"""The keys of `contenders.PEERS`, repeated here because that module imports torch."""

SHAPE = ("d512x12",)
"""The default of `--shape`."""

VOCAB = 1024
"""The default of `--vocab`, except for published models."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peer",
        choices=PEERS,
        nargs="+",
        default=["hf"],
        help="transformers, vLLM and llama.cpp (see `make peers`), one or more of them "
        "(default: hf)",
    )
    add_batches_flag(parser, (1, 8, 32))
    parser.add_argument(
        "--only",
        metavar="NAME",
        nargs="+",
        default=[],
        help="measure only these contenders of the peers, by their names in the table "
        "(default: all)",
    )
    add_count_flag(parser, "prompt", 16, "tokens per prompt")
    add_count_flag(parser, "new-tokens", 128, "tokens per response")
    parser.add_argument(
        "--vocab",
        metavar="N",
        type=positive,
        help=f"size of the vocabulary (default: {VOCAB}; shapes of published models: their own)",
    )
    add_shape_flag(parser, SHAPE)
    add_model_flag(parser)
    add_greedy_flag(parser)
    add_count_flag(parser, "rounds", 5)
    add_compute_flags(parser)


def run(args: argparse.Namespace) -> list[ResultRow]:
    from slipstream.bench import decode
    from slipstream.bench.shapes import PUBLISHED

    dtype = settle_torch(args)
    check_model(args, SHAPE)
    rows: list[ResultRow] = []
    for shape in args.shape:
        bench = decode.DecodeBench(
            shape=shape,
            vocab_size=args.vocab or (None if shape in PUBLISHED else VOCAB),
            folder=args.model,
            batches=tuple(args.batch),
            peers=tuple(args.peer),
            only=tuple(args.only),
            prompt_length=args.prompt,
            new_tokens=args.new_tokens,
            temperature=temperature_of(args),
            dtype=dtype,
            rounds=args.rounds,
        )
        for measured in decode.run(bench, say=progress):
            print_heading(f"decode, {bench.title}, {measured[0].case}", measured)
            print(decode.table(measured))
            print(decode.summary(bench, measured), flush=True)
            rows += measured
        print(f"  a decode step of the engine, batch {min(bench.batches)}")
        print_values(decode.run_step_shares(bench))
    return rows


def summary(args: argparse.Namespace, rows: Sequence[ResultRow]) -> Mapping[str, object]:
    from slipstream.bench import decode

    return {"cases": decode.cases(rows)}


BENCHMARK = Benchmark(add_flags=add_flags, run=run, summary=summary)
