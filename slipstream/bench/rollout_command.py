"""`slipstream bench rollout`: its flags and its output.

Without `--policy` it runs models with random weights, or the one in `--model` (`rollout`). With
`--policy` it runs a trained policy and its draft head (`speculation.rollout`).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from slipstream.bench.benchmark import Benchmark
from slipstream.bench.flags import (
    BENCH_MODEL,
    RANDOM_SHAPES,
    add_compute_flags,
    add_count_flag,
    add_device_flag,
    add_greedy_flag,
    add_model_flag,
    add_shape_flag,
    check_model,
    device_of,
    settle_torch,
    temperature_of,
)
from slipstream.bench.printing import print_rows, progress, shown
from slipstream.bench.record import ResultRow, median_of
from slipstream.config.launch import positive
from slipstream.errors import ConfigError

CASES = ("equal", "mixed")
"""The keys of `rollout.FLOORS`, repeated here because that module imports torch."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policy",
        metavar="DIR",
        type=Path,
        help="run folder of a trained policy and its draft head, such as the one that `make "
        f"bench-model` writes to {BENCH_MODEL}: measure a rollout of that policy, long-tailed or "
        "with --samples, with drafts and without, instead of models with random weights",
    )
    parser.add_argument(
        "--spread",
        metavar="X",
        type=float,
        help="with --policy: longest response over the median length (default: 16; at least 8)",
    )
    parser.add_argument(
        "--samples",
        metavar="N",
        type=positive,
        help="with --policy: take the responses to the first prompts as the policy writes them, N "
        "per prompt, instead of choosing a long tail",
    )
    parser.add_argument(
        "--copy-bits",
        type=int,
        choices=(4, 8),
        help="with --policy: also draft with a quantized copy of the policy",
    )
    parser.add_argument(
        "--peer",
        metavar="NAME",
        nargs="*",
        help="hf (transformers; the default), vllm or llamacpp (see `make peers`); with --policy, "
        "settings of vLLM and llama.cpp such as vllm-bfloat16-compiled and llamacpp-bfloat16 "
        "(default: none)",
    )
    parser.add_argument(
        "--case",
        choices=CASES,
        nargs="+",
        help="responses of equal length, or of log-normal lengths (default: both)",
    )
    parser.add_argument(
        "--batch",
        metavar="N",
        type=positive,
        help="number of responses (default: 32; for mixed, and with --policy: 64)",
    )
    parser.add_argument(
        "--new-tokens",
        metavar="N",
        type=positive,
        help="length of a response, or the median length for mixed (default: 128; for mixed: 32)",
    )
    parser.add_argument(
        "--no-memory", dest="memory", action="store_false", help="do not measure peak memory"
    )
    add_shape_flag(parser)
    add_model_flag(parser)
    add_greedy_flag(parser)
    add_device_flag(parser)
    add_count_flag(parser, "rounds", 5)
    add_compute_flags(parser)


def run(args: argparse.Namespace) -> list[ResultRow]:
    return _random_weights(args) if args.policy is None else _trained_policy(args)


def _random_weights(args: argparse.Namespace) -> list[ResultRow]:
    from slipstream.bench import rollout
    from slipstream.bench.contenders import PEERS

    for name in ("spread", "samples", "copy_bits", "device"):
        if getattr(args, name) is not None:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} needs a trained policy; add --policy DIR")
    peers = ["hf"] if args.peer is None else args.peer
    if len(peers) != 1 or peers[0] not in PEERS:
        raise ConfigError(
            f"--peer {' '.join(peers)}: without --policy give one of {', '.join(PEERS)}"
        )
    dtype = settle_torch(args)
    check_model(args, RANDOM_SHAPES)
    given = {"batch": args.batch, "new_tokens": args.new_tokens}
    rows = []
    for shape in args.shape:
        for case in args.case or CASES:
            bench = replace(
                rollout.STANDARD[case],
                shape=shape,
                folder=args.model,
                peer=peers[0],
                temperature=temperature_of(args),
                dtype=dtype,
                rounds=args.rounds,
                memory=args.memory,
                **{name: value for name, value in given.items() if value is not None},
            )
            progress(
                f"{case} lengths, {bench.title}: {len(bench.contenders)} contenders interleaved, "
                f"{args.rounds} rounds after one to warm up"
            )
            measured = rollout.run(bench)
            print_rows(f"rollout, {case} lengths, {bench.title}", measured)
            speedup = rollout.best_speedup(measured)
            floor = f"; floor {rollout.FLOORS[case]}" if peers == ["hf"] else ""
            print(f"  speedup over the faster peer {shown(speedup)}{floor}")
            rows += measured
    return rows


def _trained_policy(args: argparse.Namespace) -> list[ResultRow]:
    from slipstream.bench.speculation.rollout import SpeculationBench, run_rollout

    if args.case or args.new_tokens or args.shape != RANDOM_SHAPES or args.model or not args.memory:
        raise ConfigError(
            "--case, --new-tokens, --no-memory, --shape and --model are for rollouts without a "
            "draft head; leave them out, or leave out --policy"
        )
    if args.samples and args.spread:
        raise ConfigError("--spread chooses responses, --samples takes all; leave out one of them")
    names = ("batch", "spread", "samples", "copy_bits")
    given = {name: getattr(args, name) for name in names}
    bench = SpeculationBench(
        policy=args.policy,
        temperature=temperature_of(args),
        dtype=settle_torch(args),
        device=device_of(args),
        rounds=args.rounds,
        peers=tuple(args.peer or ()),
        **{name: value for name, value in given.items() if value is not None},
    )
    rows = run_rollout(bench, progress)
    print_rows("rollout of a trained policy", rows)
    print(f"  time of plain decoding by batch size, up to: {_shares(rows[0])}")
    return rows


def _shares(plain: ResultRow) -> str:
    from slipstream.run.engine_metrics import BATCH_NAMES

    return ", ".join(
        f"{name} {median_of(plain.values[f'share_{name}']):.0%}" for name in BATCH_NAMES
    )


def summary(args: argparse.Namespace, rows: Sequence[ResultRow]) -> Mapping[str, object]:
    if args.policy is None:
        return {}
    from slipstream.bench.speculation.rollout import gains

    return gains(rows)


def say(args: argparse.Namespace, rows: Sequence[ResultRow]) -> int:
    if args.policy is not None:
        _say_bounds(rows, natural=args.samples is not None)
    return 0


def _say_bounds(rows: Sequence[ResultRow], *, natural: bool) -> None:
    from slipstream.bench.speculation import rollout as speculation

    most = speculation.upper_bounds(rows)
    floors = {"whole": speculation.natural_floor(rows)} if natural else speculation.FLOORS
    for part, floor in floors.items():
        print(
            f"  {part}: floor {floor:.2f} over plain; upper bound {most[part]:.2f}, with drafts "
            "that are all accepted and cost no time"
        )
    print(
        "  upper bound with such drafts in the time that the head needs, whole: "
        f"{most['right_head']:.2f}"
    )
    print(
        "  upper bound by this machine's rates, for an engine without overhead, whole: "
        f"{most['roofline']:.2f}"
    )
    over = {row.contender: row.values["speculative_over_plain"] for row in rows}
    print(
        f"  with an untrained head: {shown(over[speculation.UNTRAINED])}; plain decoding a second "
        f"time: {shown(over[speculation.AGAIN])}"
    )


BENCHMARK = Benchmark(add_flags=add_flags, run=run, summary=summary, say=say)
