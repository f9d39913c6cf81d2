"""`slipstream bench`: its flags, and what each benchmark prints.

Imported for the flags by the command line, so nothing heavy is imported before a benchmark runs.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.bench.record import ResultRow, Spread, write_rows
from slipstream.config.launch import add_debug_flag, positive

if TYPE_CHECKING:
    import torch

    from bench.trl_runs import TrlBench
    from slipstream.bench.lossless.targets import Target
    from slipstream.bench.speculation.rollout import SpeculationBench

_KINDS = (
    "{rollout,decode,trl,peers,speculation,lossless,selector,train,learning,logprob,scoring,"
    "export,startup}"
)

USAGE = f"slipstream bench {_KINDS} [flags]"

EXAMPLES = """\
  slipstream bench rollout --json rollout.json
  slipstream bench rollout --case mixed --shape d512x12 --threads 1
  slipstream bench rollout --policy runs/bench-model --peer vllm-bfloat16-compiled
  slipstream bench decode --peer hf vllm --shape d512x12 --batch 1 8 32
  slipstream bench trl --policy runs/quickstart --steps 20 --rounds 1
  slipstream bench peers --json peers.json
  slipstream bench train --dtype bfloat16 --profile
  slipstream bench train --ab speculation --policy runs/quickstart --steps 20
  slipstream bench learning --policy runs/quickstart --plot learning.png
  slipstream bench speculation --policy runs/bench-model --heads runs/one runs/other
  slipstream bench export --policy runs/llama
  slipstream bench logprob --vocab 151936 --tokens 2048
  slipstream bench scoring
  slipstream bench startup
  slipstream bench lossless --json lossless.json
  slipstream bench selector --trace runs/mine/speculation.jsonl"""

_CASES = ("equal", "mixed")
_SHAPES = ("quickstart", "d512x12", "d256x8", "tiny")
_PEERS = ("hf", "vllm")
_PRECISIONS = ("bfloat16-autocast", "bfloat16-weights", "float32")
_BOTH = ("quickstart", "d512x12")
_BENCH_MODEL = Path("runs/bench-model")
_QUICKSTART = Path("runs/quickstart")


def add_flags(command: argparse.ArgumentParser) -> None:
    """One sub-command per benchmark."""
    kinds = command.add_subparsers(prog="slipstream bench", dest="benchmark", metavar=_KINDS)
    kinds.required = True
    rollout = kinds.add_parser(
        "rollout", help="rollouts with and without drafts, or the embedded engine against another"
    )
    decode = kinds.add_parser("decode", help="plain decoding by batch size against others")
    trl = kinds.add_parser(
        "trl", help="GRPO against TRL: the same loss first, then steps in turns, then accuracy"
    )
    peers = kinds.add_parser(
        "peers", help="decoding and GRPO beside other systems: all of it, in one Markdown table"
    )
    train = kinds.add_parser(
        "train", help="a training step against the matrix-product rate; RL with and without drafts"
    )
    logprob = kinds.add_parser(
        "logprob", help="log-probs under a large head, by chunks against through all logits"
    )
    scoring = kinds.add_parser(
        "scoring", help="answers scored a second, and what slow and stuck reward functions cost"
    )
    startup = kinds.add_parser("startup", help="`slipstream --help` against an idle Python")
    speculation = kinds.add_parser(
        "speculation", help="a trained policy with drafts: their depth by batch size"
    )
    lossless = kinds.add_parser("lossless", help="speculation against plain decoding, bit for bit")
    selector = kinds.add_parser(
        "selector", help="what choosing draft plans costs against the best ones in hindsight"
    )
    learning = kinds.add_parser("learning", help="RL with every algorithm: does the reward rise?")
    export = kinds.add_parser("export", help="a trained draft head in vLLM: as good as here?")
    _add_rollout_flags(rollout)
    _add_decode_flags(decode)
    _add_trl_flags(trl)
    _add_trl_flags(peers)
    peers.add_argument(
        "--from",
        dest="files",
        metavar="FILE",
        type=Path,
        nargs="+",
        default=[],
        help="rows of `bench decode` and `bench trl` in files instead of measuring",
    )
    peers.add_argument(
        "--shape",
        choices=_SHAPES,
        default="d512x12",
        help="what decodes, with random weights (default: d512x12)",
    )
    peers.add_argument(
        "--batch",
        metavar="N",
        type=positive,
        nargs="+",
        default=[1, 8, 32],
        help="batch sizes of decoding (default: 1 8 32)",
    )
    peers.add_argument(
        "--new-tokens", metavar="N", type=positive, default=128, help="of decoding (default: 128)"
    )
    peers.add_argument(
        "--decode-rounds", metavar="N", type=positive, default=5, help="of decoding (default: 5)"
    )
    _add_train_flags(train)
    _add_speculation_flags(speculation)
    _add_lossless_flags(lossless)
    _add_export_flags(export)
    _add_learning_flags(learning)
    _add_logprob_flags(logprob)
    for name, default in (("answers", 2000), ("responses", 128), ("rounds", 5)):
        scoring.add_argument(
            f"--{name}", metavar="N", type=positive, default=default, help=f"default: {default}"
        )
    selector.add_argument(
        "--trace",
        metavar="FILE",
        type=Path,
        nargs="+",
        default=[],
        help="recorded traces (speculative.trace=true) instead of simulated machines",
    )
    selector.add_argument("--seeds", metavar="N", type=positive, default=9, help="default: 9")
    startup.add_argument("--rounds", metavar="N", type=positive, default=10, help="default: 10")
    for kind, shapes in ((rollout, _BOTH), (decode, ("d512x12",)), (train, _BOTH)):
        kind.add_argument(
            "--shape",
            choices=_SHAPES,
            nargs="+",
            default=shapes,
            help=f"models with random weights (default: {' '.join(shapes)})",
        )
    for kind in (rollout, decode, speculation):
        kind.add_argument(
            "--greedy", action="store_true", help="take the likeliest token instead of sampling"
        )
    for kind in (rollout, speculation):
        kind.add_argument(
            "--device",
            choices=["cpu", "cuda"],
            help="where a trained policy decodes (default: cpu)",
        )
    for kind in (rollout, decode, speculation):
        kind.add_argument("--rounds", metavar="N", type=positive, default=5, help="default: 5")
    for kind in (rollout, decode, trl, peers, train, speculation, lossless, export):
        kind.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
        kind.add_argument("--threads", metavar="N", type=positive, help="default: PyTorch's")
    logprob.add_argument("--threads", metavar="N", type=positive, help="default: PyTorch's")
    everything = (
        rollout,
        decode,
        trl,
        peers,
        speculation,
        lossless,
        selector,
        train,
        learning,
        logprob,
        scoring,
        export,
        startup,
    )
    for kind in everything:
        kind.add_argument("--json", metavar="FILE", type=Path, help="also write the rows there")
        add_debug_flag(kind)


def _add_rollout_flags(rollout: argparse.ArgumentParser) -> None:
    rollout.add_argument(
        "--policy",
        metavar="DIR",
        type=Path,
        help="run folder of a trained policy and its draft head, such as `make bench-model` makes "
        f"in {_BENCH_MODEL}: a long-tailed rollout of what it writes, with and without drafts, "
        "instead of models with random weights",
    )
    rollout.add_argument(
        "--spread",
        metavar="X",
        type=float,
        help="of --policy's rollout: longest response over the median (default: 16; at least 8)",
    )
    rollout.add_argument(
        "--peer",
        metavar="NAME",
        nargs="*",
        help="hf (transformers; the default) or vllm (see `make peers`); with --policy any "
        "of vLLM's settings, such as vllm-bfloat16-compiled (default: none)",
    )
    rollout.add_argument(
        "--case",
        choices=_CASES,
        nargs="+",
        help="responses of equal length, or of log-normal length (default: both)",
    )
    rollout.add_argument(
        "--batch", metavar="N", type=positive, help="responses (32; mixed, and with --policy: 64)"
    )
    rollout.add_argument(
        "--new-tokens",
        metavar="N",
        type=positive,
        help="length of a response; its median where they differ (128; mixed: 32)",
    )
    rollout.add_argument(
        "--no-memory", dest="memory", action="store_false", help="leave out the peak memory"
    )


def _add_decode_flags(decode: argparse.ArgumentParser) -> None:
    decode.add_argument(
        "--peer",
        choices=_PEERS,
        nargs="+",
        default=["hf"],
        help="transformers, vLLM (see `make peers`), or both; default: hf",
    )
    decode.add_argument(
        "--batch",
        metavar="N",
        type=positive,
        nargs="+",
        default=[1, 8, 32],
        help="batch sizes (default: 1 8 32)",
    )
    decode.add_argument(
        "--only",
        metavar="NAME",
        nargs="+",
        default=[],
        help="contenders of the peers, by the names in the table (default: all)",
    )
    decode.add_argument("--prompt", metavar="N", type=positive, default=16, help="default: 16")
    decode.add_argument(
        "--new-tokens", metavar="N", type=positive, default=128, help="default: 128"
    )
    decode.add_argument("--vocab", metavar="N", type=positive, default=1024, help="default: 1024")


def _add_trl_flags(trl: argparse.ArgumentParser) -> None:
    trl.add_argument(
        "--policy",
        metavar="DIR",
        type=Path,
        default=_QUICKSTART,
        help=f"run folder that SFT has begun, and its draft head (default: {_QUICKSTART})",
    )
    for name, default, meaning in (
        ("steps", 100, "steps of ours in a round; of those of all the first three do not count"),
        ("rounds", 3, "whole trainings of each, with a seed of their own"),
    ):
        trl.add_argument(
            f"--{name}",
            metavar="N",
            type=positive,
            default=default,
            help=f"{meaning} (default: {default})",
        )
    trl.add_argument(
        "--problems",
        metavar="N",
        type=int,
        default=1024,
        help="held-out problems that the trained policies are compared on; 0: none (default: 1024)",
    )
    trl.add_argument(
        "--precision",
        choices=_PRECISIONS,
        nargs="+",
        default=[],
        help="of TRL (default: float32; beside our bfloat16 all)",
    )
    trl.add_argument(
        "--set", metavar="KEY=VALUE", nargs="+", default=[], help="settings of the runs"
    )


def _add_train_flags(train: argparse.ArgumentParser) -> None:
    train.add_argument("--rows", metavar="N", type=positive, default=32, help="default: 32")
    train.add_argument(
        "--length", metavar="N", type=positive, default=128, help="tokens per row (default: 128)"
    )
    train.add_argument("--optimizer", choices=["AdamW", "Muon"], default="AdamW")
    train.add_argument(
        "--matmul-size", metavar="N", type=positive, default=2048, help="default: 2048"
    )
    train.add_argument("--profile", action="store_true", help="also print the time by operation")
    train.add_argument(
        "--rounds", metavar="N", type=positive, help="default: 5, or one of runs with --ab"
    )
    ab = train.add_argument_group(
        "RL with and without drafts", "whole runs of the settings that a trained policy's run has"
    )
    ab.add_argument(
        "--ab",
        choices=["speculation"],
        help="the same RL plainly, with the draft head as it is, and with one that learns beside "
        "the policy: the same responses and weights, and the time of each",
    )
    ab.add_argument(
        "--policy",
        metavar="DIR",
        type=Path,
        help=f"run folder that SFT has begun (default: {_QUICKSTART})",
    )
    ab.add_argument("--steps", metavar="N", type=positive, help="RL steps (default: the run's)")
    ab.add_argument(
        "--set", metavar="KEY=VALUE", nargs="+", default=[], help="settings of all three"
    )


def _add_speculation_flags(speculation: argparse.ArgumentParser) -> None:
    speculation.add_argument(
        "--plot", metavar="PNG", type=Path, help="draw the table as a heat map, too"
    )
    speculation.add_argument(
        "--policy",
        metavar="DIR",
        type=Path,
        default=_BENCH_MODEL,
        help="run folder with a policy and a draft head (default: what `make bench-model` makes)",
    )
    speculation.add_argument(
        "--batch",
        metavar="N",
        type=positive,
        nargs="+",
        default=[1, 2, 4, 8, 16, 32, 64],
        help="batch sizes (default: 1 2 4 8 16 32 64)",
    )
    speculation.add_argument(
        "--new-tokens",
        metavar="N",
        type=positive,
        default=64,
        help="length of a response (default: 64); without --heads those of small batches are up to "
        "four times as long",
    )
    speculation.add_argument(
        "--candidates",
        metavar="N",
        type=positive,
        default=2048,
        help="responses that those measured are chosen from (default: 2048)",
    )
    speculation.add_argument(
        "--no-selector",
        dest="selectors",
        action="store_false",
        help="measure plans alone: a selector takes most of the time",
    )
    speculation.add_argument(
        "--heads",
        metavar="DIR",
        type=Path,
        nargs="+",
        help="draft heads to compare with each other, in turns, instead of plans by batch size",
    )
    speculation.add_argument(
        "--bound",
        action="store_true",
        help="instead of the table and the selector: by batch size the best tree beside the best "
        "chain, and how fast a tree would be that took no more than a chain of as many levels and "
        "what the policy takes for its further rows",
    )
    speculation.add_argument(
        "--plan",
        metavar="PLAN",
        nargs="+",
        help="plans to measure (default: those of docs/speculation.md; with --heads 1_1_2 3_1_4 "
        "5_1_6 7_1_8, beside the selector)",
    )


def _add_lossless_flags(lossless: argparse.ArgumentParser) -> None:
    lossless.add_argument(
        "--tokens",
        metavar="N",
        type=positive,
        default=240_000,
        help="how many to compare at least, over all models and proposers (default: 240000)",
    )
    lossless.add_argument(
        "--shape",
        choices=_SHAPES,
        nargs="*",
        default=_SHAPES[:2],
        help="models with random weights (default: quickstart d512x12); may be empty",
    )
    lossless.add_argument(
        "--policy",
        metavar="DIR",
        type=Path,
        help="also a trained model: the folder of a run (with its draft head), or of Hugging Face",
    )
    lossless.add_argument(
        "--head",
        metavar="DIR",
        type=Path,
        help="the draft head of --policy (default: the run's; without one, one is trained)",
    )


def _add_export_flags(export: argparse.ArgumentParser) -> None:
    export.add_argument(
        "--policy",
        metavar="DIR",
        type=Path,
        required=True,
        help="run folder of a policy of the Llama family and its draft head",
    )
    export.add_argument(
        "--depth",
        metavar="N",
        type=positive,
        nargs="+",
        default=[1, 3, 5],
        help="drafts in a row (default: 1 3 5)",
    )
    export.add_argument("--prompts", metavar="N", type=positive, default=64, help="default: 64")
    export.add_argument("--new-tokens", metavar="N", type=positive, default=64, help="default: 64")
    export.add_argument(
        "--at-once", metavar="N", type=positive, default=1, help="prompts for vLLM (default: 1)"
    )


def _add_learning_flags(learning: argparse.ArgumentParser) -> None:
    learning.add_argument(
        "--policy",
        metavar="FOLDER",
        type=Path,
        default=_QUICKSTART,
        help=f"run folder with an SFT to begin from (default: {_QUICKSTART})",
    )
    learning.add_argument(
        "--only", metavar="NAME", nargs="+", default=[], help="some algorithms (default: all)"
    )
    learning.add_argument(
        "--steps", metavar="N", type=positive, default=30, help="RL steps of each (default: 30)"
    )
    learning.add_argument(
        "--set", metavar="KEY=VALUE", nargs="+", default=[], help="settings of all runs"
    )
    learning.add_argument("--plot", metavar="PNG", type=Path, help="also draw the curves")


def _add_logprob_flags(logprob: argparse.ArgumentParser) -> None:
    for name, default in (("tokens", 8192), ("vocab", 32_768), ("hidden", 512), ("rounds", 5)):
        logprob.add_argument(
            f"--{name}", metavar="N", type=positive, default=default, help=f"default: {default}"
        )
    logprob.add_argument(
        "--keep-megabytes",
        metavar="N",
        type=int,
        default=600,
        help="logits that the third contender keeps for its backward pass (default: 600)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the benchmark that parsed flags ask for, print its rows and write them where asked."""
    benchmarks = {
        "rollout": _rollout,
        "decode": _decode,
        "trl": _trl,
        "peers": _peers,
        "speculation": _speculation,
        "lossless": _lossless,
        "selector": _selector,
        "train": _train,
        "learning": _learning,
        "logprob": _logprob,
        "scoring": _scoring,
        "export": _export,
        "startup": _startup,
    }
    rows = benchmarks[args.benchmark](args)
    if args.json is not None:
        write_rows(args.json, rows, _summary(args, rows))
    if args.benchmark == "lossless":
        return 1 if _report_differences(rows) else 0
    if args.benchmark == "export":
        return 0 if _say_export(rows) else 1
    if args.benchmark == "logprob":
        return 1 if _say_logprob(rows) else 0
    if args.benchmark == "scoring":
        return 1 if _say_scoring(rows) else 0
    if args.benchmark == "learning":
        return 1 if _say_learning(rows) else 0
    if args.benchmark == "trl":
        return 0 if _say_trl(rows) else 1
    if args.benchmark == "selector":
        return 1 if _say_regret(rows) else 0
    return 1 if _is_ab(args) and not _say_ab(rows) else 0


def _is_ab(args: argparse.Namespace) -> bool:
    return args.benchmark == "train" and args.ab is not None


def _summary(args: argparse.Namespace, rows: Sequence[ResultRow]) -> Mapping[str, object]:
    """What the rows come to, by name."""
    from bench import trl_compare as trl
    from slipstream.bench import ab, decode
    from slipstream.bench.lossless import check as lossless
    from slipstream.bench.speculation import rollout as speculation
    from slipstream.bench.speculation import tree_bound

    if args.benchmark == "decode":
        return {"cases": decode.cases(rows)}
    if args.benchmark == "trl":
        return trl.summary(rows)
    if args.benchmark == "lossless":
        return lossless.counts(rows)
    if args.benchmark == "rollout" and args.policy is not None:
        return speculation.gains(rows)
    if args.benchmark == "speculation" and args.bound:
        return {"trees_over_chains": tree_bound.summary(rows)}
    if _is_ab(args):
        return ab.summary(rows)
    return {}


def _rollout(args: argparse.Namespace) -> list[ResultRow]:
    from slipstream.bench import rollout
    from slipstream.bench.contenders import PEERS
    from slipstream.errors import ConfigError

    if args.policy is not None:
        return _rollout_of_policy(args)
    for name in ("spread", "device"):
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name} is of a trained policy's rollout; give --policy, too")
    peers = ["hf"] if args.peer is None else args.peer
    if len(peers) != 1 or peers[0] not in PEERS:
        raise ConfigError(f"--peer {' '.join(peers)}: without --policy one of {', '.join(PEERS)}")
    dtype = _settle_torch(args)
    given = {"batch": args.batch, "new_tokens": args.new_tokens}
    rows = []
    for shape in args.shape:
        for case in args.case or _CASES:
            bench = replace(
                rollout.STANDARD[case],
                shape=shape,
                peer=peers[0],
                temperature=0.0 if args.greedy else 1.0,
                dtype=dtype,
                rounds=args.rounds,
                memory=args.memory,
                **{name: value for name, value in given.items() if value is not None},
            )
            contenders = len(PEERS[peers[0]]) + 1
            print(
                f"{case} lengths, {shape}: {contenders} contenders in turns, {args.rounds} rounds "
                "after one to warm up",
                file=sys.stderr,
            )
            measured = rollout.run(bench)
            _print(f"rollout, {case} lengths, {shape}", measured)
            speedup = rollout.best_speedup(measured)
            floor = f"; floor {rollout.FLOORS[case]}" if peers == ["hf"] else ""
            print(f"  speedup over the faster peer {_shown(speedup)}{floor}")
            rows += measured
    return rows


def _decode(args: argparse.Namespace) -> list[ResultRow]:
    from slipstream.bench import decode

    dtype = _settle_torch(args)
    rows: list[ResultRow] = []
    for shape in args.shape:
        bench = decode.DecodeBench(
            shape=shape,
            vocab_size=args.vocab,
            batches=tuple(args.batch),
            peers=tuple(args.peer),
            only=tuple(args.only),
            prompt_length=args.prompt,
            new_tokens=args.new_tokens,
            temperature=0.0 if args.greedy else 1.0,
            dtype=dtype,
            rounds=args.rounds,
        )
        say = partial(print, file=sys.stderr, flush=True)
        for measured in decode.run(bench, say=say):
            _print_heading(f"decode, {shape}, {measured[0].case}", measured)
            print(decode.table(measured))
            print(decode.summary(bench, measured), flush=True)
            rows += measured
        print(f"  a decode step of the engine, batch {min(bench.batches)}")
        _print_values(decode.run_step_shares(bench))
    return rows


def _trl(args: argparse.Namespace) -> list[ResultRow]:
    from bench import trl_compare as trl

    rows = trl.run(_trl_bench(args), partial(print, file=sys.stderr, flush=True))
    _print("GRPO beside TRL", rows)
    return rows


def _trl_bench(args: argparse.Namespace) -> TrlBench:
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


def _say_trl(rows: Sequence[ResultRow]) -> bool:
    """Print whether speed and accuracy are as promised; whether they are."""
    from bench import trl_compare as trl

    found = trl.summary(rows)
    speedups, not_below = trl.speedups(rows), found["not_below"]
    shown = ", ".join(f"{name} {value:.2f}x" for name, value in speedups.items())
    print(f"  over {found['fastest_peer']}, the fastest of TRL: {shown} (floor: {trl.SPEED_GOAL}x)")
    if not_below is not None:
        said = "reaches" if not_below else "is BELOW"
        print(f"  held-out accuracy {said} TRL's interval")
    return max(speedups.values()) >= trl.SPEED_GOAL and not_below is not False


def _peers(args: argparse.Namespace) -> list[ResultRow]:
    from bench import peers_table as peers
    from slipstream.bench.record import read_rows

    rows = [row for file in args.files for row in read_rows(file)] or _measured_peers(args)
    print(peers.table(rows))
    return rows


def _measured_peers(args: argparse.Namespace) -> list[ResultRow]:
    """Decoding against transformers, and vLLM where it is installed, then GRPO against TRL."""
    from bench import trl_compare as trl
    from bench.trl_runs import trl_command
    from slipstream.bench import decode
    from slipstream.bench.contenders import vllm_command
    from slipstream.errors import ConfigError

    say = partial(print, file=sys.stderr, flush=True)
    # What is missing is said before anything is measured.
    trl_command()
    beside: tuple[str, ...] = ("hf",)
    try:
        vllm_command()
        beside = ("hf", "vllm")
    except ConfigError as error:
        say(f"without vLLM: {error}")
    trl_bench = _trl_bench(args)
    bench = decode.DecodeBench(
        shape=args.shape,
        batches=tuple(args.batch),
        peers=beside,
        new_tokens=args.new_tokens,
        dtype=_settle_torch(args),
        rounds=args.decode_rounds,
    )
    rows = [row for case in decode.run(bench, say=say) for row in case]
    return [*rows, *trl.run(trl_bench, say)]


def _train(args: argparse.Namespace) -> list[ResultRow]:
    from slipstream.bench import train
    from slipstream.errors import ConfigError

    if _is_ab(args):
        return _train_ab(args)
    if args.policy is not None or args.steps is not None or args.set:
        raise ConfigError("--policy, --steps and --set are of whole runs; give --ab speculation")
    dtype = _settle_torch(args)
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
        _print(f"training step, {shape}", [row])
        print(f"  floor: {train.FLOOR} of the matrix-product rate")
        if args.profile:
            print(train.profile(bench))
        rows.append(row)
    return rows


def _train_ab(args: argparse.Namespace) -> list[ResultRow]:
    from slipstream.bench import ab
    from slipstream.errors import ConfigError

    if args.shape != _BOTH or args.dtype != "auto" or args.threads is not None or args.profile:
        raise ConfigError(
            "--shape, --dtype, --threads and --profile are of a step of random weights; with --ab "
            "give settings of the run, such as --set actor_rollout_ref.rollout.dtype=float32 "
            "trainer.num_threads=1"
        )
    bench = ab.AbBench(
        policy=args.policy or _QUICKSTART,
        steps=args.steps,
        rounds=args.rounds or 1,
        settings=tuple(args.set),
    )
    rows = ab.run(bench, partial(print, file=sys.stderr, flush=True))
    _print("RL with and without drafts", rows)
    return rows


def _logprob(args: argparse.Namespace) -> list[ResultRow]:
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
    _print("log-probs, forward and backward", rows)
    return rows


def _scoring(args: argparse.Namespace) -> list[ResultRow]:
    from slipstream.bench import scoring

    rows = scoring.run(
        scoring.ScoringBench(answers=args.answers, responses=args.responses, rounds=args.rounds)
    )
    _print("scoring", rows)
    return rows


def _say_scoring(rows: Sequence[ResultRow]) -> int:
    """Print which floors were missed; how many."""
    from slipstream.bench import scoring

    missed = scoring.missed(rows)
    print(
        f"  floor: {scoring.RATE_FLOOR:,.0f} answers a second, less than {scoring.SLOW_FLOOR:g} s "
        f"for responses whose function sleeps 1 s, {scoring.STUCK_FLOOR:g} s beyond its deadline "
        f"for one that is stuck: " + (f"missed: {'; '.join(missed)}" if missed else "reached")
    )
    return len(missed)


def _say_logprob(rows: Sequence[ResultRow]) -> int:
    """Print which floors were missed; how many."""
    from bench import logprob

    missed = logprob.missed(rows)
    print(
        f"  floor: no slower than plain with logits kept, {logprob.MEMORY_FLOOR:.0%} of its "
        f"memory, gradients within {logprob.GRADIENT_FLOOR:g}: "
        + (f"missed: {'; '.join(missed)}" if missed else "reached")
    )
    return len(missed)


def _export(args: argparse.Namespace) -> list[ResultRow]:
    from bench import export

    bench = export.ExportBench(
        policy=args.policy,
        dtype=_settle_torch(args),
        depths=tuple(args.depth),
        prompts=args.prompts,
        new_tokens=args.new_tokens,
        at_once=args.at_once,
    )
    rows = export.run(bench, partial(print, file=sys.stderr, flush=True))
    _print_heading("a draft head in vLLM, greedily", rows)
    for row in rows:
        print(f"  {row.case}")
        _print_values(row.values)
    return rows


def _say_export(rows: Sequence[ResultRow]) -> bool:
    """Print how far vLLM's acceptance is from ours, and whether drafts change what it writes;
    whether all of that is as promised."""
    from bench.export import TIES, TOLERANCE, good, ratio_of, widest_parting
    from slipstream.bench.record import median_of

    furthest = max(abs(ratio_of(row) - 1) for row in rows)
    print(
        f"  tokens per verification in vLLM are within {furthest:.1%} of ours at every depth "
        f"(promised: {TOLERANCE:.0%})"
    )
    same = {
        name: min(median_of(row.values[name]) for row in rows)
        for name in ("vllm_same_as_plain", "same_responses")
    }
    print(
        f"  {same['vllm_same_as_plain']:.1%} of vLLM's responses with drafts are those without, "
        f"{same['same_responses']:.1%} are ours; where they part, the two likeliest tokens are "
        f"{max(map(widest_parting, rows)):.2g} nats apart at most (promised: {TIES[rows[0].dtype]} "
        f"in {rows[0].dtype}; usually: {median_of(rows[0].values['vllm_median_gap']):.2g})"
    )
    return good(rows)


def _startup(args: argparse.Namespace) -> list[ResultRow]:
    from bench import startup

    rows = startup.run(rounds=args.rounds)
    _print("start of the command line", rows)
    print(f"  floor: `slipstream --help` within {startup.FLOOR_SECONDS} s")
    return rows


def _rollout_of_policy(args: argparse.Namespace) -> list[ResultRow]:
    from slipstream.bench.speculation import rollout as speculation
    from slipstream.errors import ConfigError

    if args.case or args.new_tokens or args.shape != _BOTH or not args.memory:
        raise ConfigError(
            "--case, --new-tokens, --no-memory and --shape are of models with random weights; with "
            "--policy the policy's own responses are decoded"
        )
    given = {"batch": args.batch, "spread": args.spread}
    bench = speculation.SpeculationBench(
        policy=args.policy,
        temperature=0.0 if args.greedy else 1.0,
        dtype=_settle_torch(args),
        device=_device(args),
        rounds=args.rounds,
        peers=tuple(args.peer or ()),
        **{name: value for name, value in given.items() if value is not None},
    )
    rows = speculation.run_rollout(bench, partial(print, file=sys.stderr, flush=True))
    _print("long-tailed rollout of a trained policy", rows)
    most = speculation.most_possible(rows)
    for part, floor in speculation.FLOORS.items():
        print(
            f"  {part}: floor {floor} over plain; drafts that are always right and take "
            f"no time: {most[part]:.2f}"
        )
    print(
        f"  such drafts in the time that the head takes to draft, whole: {most['right_head']:.2f}"
    )
    print(
        "  such drafts on an engine that wastes nothing of this machine's rates, whole: "
        f"{most['roofline']:.2f}"
    )
    over = {row.contender: row.values["speculative_over_plain"] for row in rows}
    print(
        f"  a head that was never trained: {_shown(over[speculation.UNTRAINED])}, where plain "
        f"decoding once more is {_shown(over[speculation.AGAIN])}"
    )
    return rows


def _speculation(args: argparse.Namespace) -> list[ResultRow]:
    from slipstream.bench.speculation import grid
    from slipstream.bench.speculation import rollout as speculation
    from slipstream.inference.speculation.plan import DraftPlan

    bench = speculation.SpeculationBench(
        policy=args.policy,
        temperature=0.0 if args.greedy else 1.0,
        dtype=_settle_torch(args),
        rounds=args.rounds,
        device=_device(args),
        plans=tuple(map(DraftPlan.parse, args.plan or ())),
        selectors=args.selectors,
        batches=tuple(args.batch),
        new_tokens=args.new_tokens,
        candidates=args.candidates,
    )
    if args.heads is not None:
        return _heads(args, bench)
    if args.bound:
        return _bound(args, bench)
    rows = grid.run_grid(bench, partial(print, file=sys.stderr, flush=True))
    _print_heading("depth of drafts by batch size", rows)
    print(grid.grid_table(rows), flush=True)
    if args.plot is not None:
        from slipstream.bench.speculation.heat_map import plot_grid

        print(f"  picture: {plot_grid(rows, args.plot)}")
    return rows


def _heads(args: argparse.Namespace, bench: SpeculationBench) -> list[ResultRow]:
    from slipstream.bench.speculation import heads
    from slipstream.errors import ConfigError

    if args.plot is not None or not args.selectors or args.bound:
        raise ConfigError(
            "--plot, --no-selector and --bound are of plans by batch size; leave out --heads"
        )
    fixed = bench.plans or heads.PLANS
    rows = heads.run_heads(bench, args.heads, partial(print, file=sys.stderr, flush=True), fixed)
    _print_heading("draft heads in turns", rows)
    print(heads.heads_table(rows), flush=True)
    return rows


def _bound(args: argparse.Namespace, bench: SpeculationBench) -> list[ResultRow]:
    from slipstream.bench.speculation import tree_bound
    from slipstream.errors import ConfigError

    if args.plot is not None:
        raise ConfigError("--plot draws the whole table; leave out --bound")
    rows = tree_bound.run_bound(bench, partial(print, file=sys.stderr, flush=True))
    _print_heading("trees beside chains by batch size", rows)
    print(tree_bound.bound_table(rows), flush=True)
    return rows


def _lossless(args: argparse.Namespace) -> list[ResultRow]:
    from slipstream.bench.lossless import check as lossless
    from slipstream.bench.lossless.targets import random_target, trained_target
    from slipstream.bench.lossless.workloads import PROPOSERS, LosslessBench
    from slipstream.errors import ConfigError

    dtype = _settle_torch(args)
    if args.head is not None and args.policy is None:
        raise ConfigError("--head names the draft head of a trained policy; give --policy, too")
    makers: dict[str, Callable[[], Target]] = {}
    if args.policy is not None:
        # First: whether its files can be read is known at once.
        makers["policy"] = partial(trained_target, args.policy, args.head)
    makers |= {shape: partial(random_target, shape) for shape in args.shape}
    if not makers:
        raise ConfigError("nothing to check: --shape names no model; name one or give --policy")
    # A token of the widest model with its large vocabulary takes as long as several of another.
    weights = {name: 1 if name == "d512x12" else 4 for name in makers}
    rows = []
    for name, make in makers.items():
        print(f"{name}: making the policy and its draft head", file=sys.stderr)
        share = args.tokens * weights[name] / sum(weights.values())
        tokens = math.ceil(share / len(PROPOSERS))
        bench = LosslessBench(target=make(), tokens=tokens, dtype=dtype)
        measured = lossless.run(bench, lambda line: print(line, file=sys.stderr, flush=True))
        _print(f"speculation against plain decoding, {name}", measured)
        rows += measured
    return rows


def _selector(args: argparse.Namespace) -> list[ResultRow]:
    from bench import selector_regret as regret

    rows = regret.run(args.trace, seeds=args.seeds)
    print(
        f"regret: share of the time that the best draft plans would have saved; {args.seeds} seeds"
    )
    print(regret.table(rows))
    return rows


def _learning(args: argparse.Namespace) -> list[ResultRow]:
    from bench import learning

    bench = learning.LearningBench(
        policy=args.policy, steps=args.steps, only=tuple(args.only), settings=tuple(args.set)
    )
    rows = learning.run(bench, partial(print, file=sys.stderr, flush=True))
    print("validation and training reward, first and last sixth of the steps")
    print(learning.table(rows))
    if args.plot is not None:
        print(f"  picture: {learning.plot(rows, args.plot)}")
    return rows


def _say_learning(rows: Sequence[ResultRow]) -> int:
    """Print which algorithms have not raised the reward; how many."""
    from bench.learning import not_learned

    missed = not_learned(rows)
    print(f"  floor: a higher validation reward; missed by {', '.join(missed) or 'none'}")
    return len(missed)


def _say_regret(rows: Sequence[ResultRow]) -> int:
    """Print where the default selector is further from the best plans than it may be; in how many
    worlds."""
    from bench import selector_regret as regret

    default = next(iter(regret.SELECTORS))
    missed = regret.missed(rows)
    said = f"missed in {', '.join(missed)}" if missed else "reached in all worlds"
    print(f"  floor: {default} within {regret.FLOOR:.0%} of the best fixed plans, warm: {said}")
    return len(missed)


def _report_differences(rows: Sequence[ResultRow]) -> int:
    """Print the sum over all rows; how many tokens differ."""
    from slipstream.bench.lossless.check import different, total

    found = different(rows)
    print(
        f"\n{total(rows, 'tokens'):,} tokens compared, {total(rows, 'accepted'):,} of them from "
        f"accepted drafts, {total(rows, 'siblings'):,} of which were not their parents' first; "
        f"{found:,} differ in id or log-probs"
    )
    return found


def _say_ab(rows: Sequence[ResultRow]) -> bool:
    """Print whether all runs are the same to the last bit, what they ended with, and how drafts
    fared on the way. Returns whether they are, or on a GPU as good as."""
    from slipstream.bench import ab

    print()
    for row in rows:
        print(
            f"  {row.contender:<12} weights {row.settings['weights_sha256']}, responses "
            f"{row.settings['responses_sha256']}"
        )
    summary = ab.summary(rows)
    same = summary["identical"] is True
    parted = summary[ab.PARTED]
    assert isinstance(parted, float)
    on_gpu = any(row.settings[ab.DEVICE] == "cuda" for row in rows)
    if same:
        print("  identical: responses, log-probs, rewards and final weights, bit for bit")
    elif on_gpu:
        print(
            f"  not identical, which a GPU's rounding may do: in the first step, whose weights are "
            f"the same, {parted:.2%} of tokens are the first to differ (at most "
            f"{ab.MOST_PARTED:.0%} is taken for rounding)"
        )
    else:
        print("  NOT identical: drafts have changed what was trained, a bug")
    curves = {row.contender: row.settings[ab.ACCEPT_CURVE] for row in rows}
    if any(curves.values()):
        print("\n  tokens per verification, in each tenth of the steps")
        for name, curve in curves.items():
            if curve:
                print(f"  {name:<12} {curve}")
    gained = summary.get("accept_length_over_frozen")
    if isinstance(gained, float):
        print(f"  at the end, the head that learned over the one that did not: {gained:+.1%}")
    over = summary.get("trees_over_chains")
    if isinstance(over, float):
        by_step, error = (summary[f"trees_over_chains_{name}"] for name in ("by_step", "error"))
        print(
            f"  rollouts with trees allowed, over those with chains alone: {over:.3f}x; the median "
            f"of steps {by_step:.3f}x ±{error:.3f}"
        )
    return same or (on_gpu and parted <= ab.MOST_PARTED)


def _settle_torch(args: argparse.Namespace) -> torch.dtype:
    """Apply --threads; the dtype that --dtype asks for."""
    import torch

    from slipstream.models.numerics import dtype_from_name

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    return dtype_from_name(args.dtype, _device(args))


def _device(args: argparse.Namespace) -> torch.device:
    import torch

    return torch.device(getattr(args, "device", None) or "cpu")


def _print(title: str, rows: Sequence[ResultRow]) -> None:
    _print_heading(title, rows)
    for row in rows:
        print(f"  {row.contender}")
        _print_values({"seconds": row.seconds, **row.values})


def _print_heading(title: str, rows: Sequence[ResultRow]) -> None:
    """What the rows have in common, and what peers run with."""
    first = rows[0]
    machine = first.machine
    versions = " ".join(f"{name} {number}" for name, number in machine.versions.items())
    flags = " ".join(machine.cpu_flags)
    compute = f"{first.dtype}, {first.threads} threads; " if first.threads is not None else ""
    gpu = f"{machine.gpu}; " if machine.gpu else ""
    print(f"\n{title}: {compute}{gpu}{machine.cpu} [{flags}], {machine.cores} cores; {versions}")
    theirs = {tuple(row.machine.versions.items()): None for row in rows}
    for others in [found for found in theirs if found != tuple(machine.versions.items())]:
        print("  beside it: " + " ".join(f"{name} {number}" for name, number in others))
    if first.settings:
        print("  " + " ".join(f"{name}={value}" for name, value in first.settings.items()))
    print(f"  median [least .. most] of {first.seconds.n} runs in turns")


def _print_values(values: Mapping[str, float | Spread]) -> None:
    for name, value in values.items():
        print(f"    {name:<32} {_shown(value)}")
    # Minutes pass between cases, and a file or pipe would show nothing of them.
    sys.stdout.flush()


def _shown(value: float | Spread) -> str:
    if isinstance(value, Spread):
        return f"{value.median:.4g} [{value.min:.4g} .. {value.max:.4g}]"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
