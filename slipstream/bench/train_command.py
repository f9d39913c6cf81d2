"""`slipstream bench train`: its flags and its output.

Without `--ab` it measures a training step of random weights (`train`). With `--ab speculation` it
runs the same RL with and without drafts (`ab`).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from slipstream.bench.benchmark import Benchmark
from slipstream.bench.flags import (
    QUICKSTART,
    RANDOM_SHAPES,
    add_compute_flags,
    add_count_flag,
    add_settings_flag,
    add_shape_flag,
    settle_torch,
)
from slipstream.bench.printing import print_rows, progress
from slipstream.bench.record import ResultRow
from slipstream.config.launch import positive
from slipstream.errors import ConfigError


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_count_flag(parser, "rows", 32, "sequences per step")
    add_count_flag(parser, "length", 128, "tokens per sequence")
    parser.add_argument("--optimizer", choices=["AdamW", "Muon"], default="AdamW")
    add_count_flag(parser, "matmul-size", 2048, "side of the square matrices to compare with")
    parser.add_argument("--profile", action="store_true", help="also print the time by operation")
    parser.add_argument(
        "--rounds", metavar="N", type=positive, help="default: 5; with --ab 1 round of runs"
    )
    ab = parser.add_argument_group(
        "RL with and without drafts", "whole RL runs with the settings of a trained policy's run"
    )
    ab.add_argument(
        "--ab",
        choices=["speculation"],
        help="run the same RL without drafts, with a fixed draft head, and with a co-trained draft "
        "head; check for equal responses and weights, and compare the times",
    )
    ab.add_argument(
        "--policy",
        metavar="DIR",
        type=Path,
        help=f"run folder whose policy RL starts from (default: {QUICKSTART})",
    )
    ab.add_argument("--steps", metavar="N", type=positive, help="RL steps (default: the run's)")
    add_settings_flag(ab, "settings of all runs")
    add_shape_flag(parser)
    add_compute_flags(parser)


def run(args: argparse.Namespace) -> list[ResultRow]:
    return _training_steps(args) if args.ab is None else _whole_runs(args)


def _training_steps(args: argparse.Namespace) -> list[ResultRow]:
    from slipstream.bench import train

    if args.policy is not None or args.steps is not None or args.set:
        raise ConfigError("--policy, --steps and --set need whole RL runs; add --ab speculation")
    dtype = settle_torch(args)
    rows = []
    for shape in args.shape:
        bench = train.TrainBench(
            shape=shape,
            rows=args.rows,
            length=args.length,
            optimizer=args.optimizer,
            dtype=dtype,
            matmul_size=args.matmul_size,
            rounds=args.rounds or 5,
        )
        row = train.run(bench)
        print_rows(f"training step, {shape}", [row])
        print(f"  floor: {train.FLOOR} of the matrix-product rate")
        if args.profile:
            print(train.profile(bench))
        rows.append(row)
    return rows


def _whole_runs(args: argparse.Namespace) -> list[ResultRow]:
    from slipstream.bench import ab

    if args.shape != RANDOM_SHAPES or args.dtype != "auto" or args.threads or args.profile:
        raise ConfigError(
            "--shape, --dtype, --threads and --profile are for a step of random weights; with --ab "
            "change settings of the runs instead, such as --set "
            "actor_rollout_ref.rollout.dtype=float32 trainer.num_threads=1"
        )
    bench = ab.AbBench(
        policy=args.policy or QUICKSTART,
        steps=args.steps,
        rounds=args.rounds or 1,
        settings=tuple(args.set),
    )
    rows = ab.run(bench, progress)
    print_rows("RL with and without drafts", rows)
    return rows


def summary(args: argparse.Namespace, rows: Sequence[ResultRow]) -> Mapping[str, object]:
    if args.ab is None:
        return {}
    from slipstream.bench import ab

    return ab.summary(rows)


def say(args: argparse.Namespace, rows: Sequence[ResultRow]) -> int:
    if args.ab is None:
        return 0
    return 0 if say_ab(rows) else 1


def say_ab(rows: Sequence[ResultRow]) -> bool:
    """Print whether all runs agree, and how the drafts did.

    Returns whether all runs are equal to the last bit; on a GPU, whether they differ only as often
    as rounding explains (`ab.MAX_DIVERGENCE`).
    """
    from slipstream.bench import ab

    print()
    for row in rows:
        print(
            f"  {row.contender:<12} weights {row.settings['weights_sha256']}, responses "
            f"{row.settings['responses_sha256']}"
        )
    found = ab.summary(rows)
    same = found["identical"] is True
    divergence = found[ab.DIVERGENCE]
    assert isinstance(divergence, float)
    on_gpu = any(row.settings[ab.DEVICE] == "cuda" for row in rows)
    if same:
        print("  identical: responses, log-probs, rewards and final weights, bit for bit")
    elif on_gpu:
        print(
            "  not identical, which rounding can cause on a GPU: in the first step, which starts "
            f"from equal weights, {divergence:.2%} of tokens are the first of their response to "
            f"differ (rounding explains up to {ab.MAX_DIVERGENCE:.0%})"
        )
    else:
        print("  NOT identical: drafts changed the trained policy, which is a bug")
    curves = {row.contender: row.settings[ab.ACCEPT_CURVE] for row in rows}
    if any(curves.values()):
        print("\n  tokens per verification, in each tenth of the steps")
        for name, curve in curves.items():
            if curve:
                print(f"  {name:<12} {curve}")
    gained = found.get("accept_length_over_frozen")
    if isinstance(gained, float):
        print(f"  at the end, the co-trained head over the fixed head: {gained:+.1%}")
    over = found.get("trees_over_chains")
    if isinstance(over, float):
        by_step, error = (found[f"trees_over_chains_{name}"] for name in ("by_step", "error"))
        print(
            f"  speed of rollouts with trees allowed over chains only: {over:.3f}x; median over "
            f"steps {by_step:.3f}x ±{error:.3f}"
        )
    return same or (on_gpu and divergence <= ab.MAX_DIVERGENCE)


BENCHMARK = Benchmark(add_flags=add_flags, run=run, summary=summary, say=say)
