"""TRL's GRPO against ours, with the same model, prompts, lengths and settings.

First it compares results (`trl_parity`): both must compute the same loss and gradients for one
batch, and the same weights after several optimizer steps on given batches. Otherwise nothing is
timed. Then it compares training. The steps of all contenders are interleaved (`interleaved_runs`),
and each contender is a separate process:

    plain               Slipstream without drafts
    speculation         Slipstream with the fixed draft head, if the policy has one
    trl-PRECISION       TRL, which generates with transformers' `generate`; see `PRECISIONS`

The time of a step is measured here, in the same way for all. Our runs end after the requested
steps. TRL trains until it has sampled the same number of tokens, so that the final policies can be
compared on held-out problems, with one evaluator. Every round has another seed; with several
rounds, the interval of an accuracy is that of its mean over seeds. Drafts change no token: policies
that are equal bit for bit are evaluated once.

Run it as `slipstream bench trl` or `python -m bench.trl_compare`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch

from bench.trl_parity import (
    CASES,
    TOLERANCE,
    UPDATE_TOLERANCE,
    Differences,
    FixedBatch,
    UpdateDifferences,
    differences,
    make_batch,
    old_log_probs,
    our_updates,
    ours,
    their_updates,
    theirs,
    update_differences,
)
from bench.trl_runs import (
    PRECISIONS,
    WARM_UP,
    ContenderRun,
    TrlBench,
    compose,
    dtype_settings,
    run_round,
    task_of,
    trl_command,
    trl_settings,
)
from slipstream.bench.ab import PLAIN
from slipstream.bench.peer_process import PeerProcess
from slipstream.bench.record import ResultRow, Spread, this_machine
from slipstream.bench.rl_line import run_line, start_of
from slipstream.bench.timing import step_ratio
from slipstream.checkpoint.layout import policy_folder
from slipstream.config.load import CONFIG_FILE
from slipstream.config.schema import Config
from slipstream.errors import EngineError
from slipstream.metrics.batch_metrics import accuracy_interval, mean_interval
from slipstream.models.numerics import dtype_from_name

UPDATES = 4
"""Number of optimizer steps after which the weights are compared."""

SPEED_GOAL = 1.5
"""The promised speed of our step over TRL's, in TRL's fastest precision."""


def run(bench: TrlBench, say: Callable[[str], None]) -> list[ResultRow]:
    """Measure; one row per parity case, then one per contender. Raises ConfigError if TRL is not
    installed, EngineError if parity or a run fails."""
    trl = trl_command()
    config = compose(bench)
    settings = trl_settings(config)
    model = start_of(bench.policy)
    task = task_of(config, model)
    batch = make_batch(task, task.tokenizer)
    steps = [make_batch(task, task.tokenizer, first=100 * step) for step in range(UPDATES)]
    rows = run_parity(model, batch, steps, settings, trl, bench.threads, say)
    dtype = dtype_of(config)
    precisions = bench.precisions or PRECISIONS[dtype]
    found: dict[str, list[ContenderRun]] = {}
    accuracies: dict[str, list[list[float]]] = {}
    versions: dict[str, str] = {}
    for number in range(bench.rounds):
        with TemporaryDirectory() as folder:
            ran, versions = run_round(
                bench, config, settings, precisions, Path(folder), trl, say, number
            )
            for name, one in ran.items():
                found.setdefault(name, []).append(one)
            if bench.problems:
                for name, scores in _evaluate(bench, ran, Path(folder), say).items():
                    accuracies.setdefault(name, []).append(scores)
    return rows + [
        training_row(bench, name, found, accuracies.get(name, []), dtype, settings, versions)
        for name in found
    ]


def dtype_of(config: Config) -> str:
    """The dtype of our matrix products on a CPU, a key of `PRECISIONS`."""
    dtype = dtype_from_name(config.actor_rollout_ref.actor.dtype, torch.device("cpu"))
    return str(dtype).removeprefix("torch.")


def run_parity(
    model: Path,
    batch: FixedBatch,
    steps: Sequence[FixedBatch],
    settings: Mapping[str, Any],
    trl: Sequence[str],
    threads: int,
    say: Callable[[str], None],
) -> list[ResultRow]:
    """One row per case with `batch`, and one for an optimizer step with `settings` on each batch of
    `steps`.

    Raises EngineError if a difference is above `TOLERANCE` or `UPDATE_TOLERANCE`.
    """
    old = old_log_probs(model, batch)
    rows = []
    with PeerProcess("trl, parity", trl) as process:
        for case in CASES:
            given = old if case.off_policy else None
            start = time.perf_counter()
            answer = theirs(process, model, batch, case, given, threads)
            seconds = time.perf_counter() - start
            apart = differences(ours(model, batch, case, given), answer)
            say(f"parity, {case.name}: {describe(apart)}")
            check(case.name, apart)
            values = {
                "loss_difference": apart.loss,
                "advantage_difference": apart.advantages,
                "gradient_difference": apart.gradient,
                "tensor_difference": apart.tensor,
            }
            rows.append(_parity_row(case.name, values, seconds, threads))
    # A new process, because TRL reads the number of threads once and keeps its trained weights.
    with PeerProcess("trl, updates", trl) as process:
        start = time.perf_counter()
        answered = their_updates(process, model, steps, settings, threads)
        seconds = time.perf_counter() - start
    apart_after = update_differences(model, our_updates(model, steps, settings), answered)
    norms = ", ".join(f"{norm:.3g}" for norm in answered.grad_norms)
    described = describe_updates(apart_after)
    say(f"parity, {len(steps)} steps with gradient norms {norms}: {described}")
    check_updates(apart_after)
    values = {
        "grad_norm_difference": apart_after.grad_norm,
        "update_difference": apart_after.update,
    }
    return [*rows, _parity_row(f"{len(steps)} steps", values, seconds, threads)]


def _parity_row(name: str, values: Mapping[str, float], seconds: float, threads: int) -> ResultRow:
    return ResultRow(
        benchmark="trl",
        case=f"parity: {name}",
        contender="trl",
        dtype="float32",
        threads=threads,
        seconds=Spread.of([seconds]),
        machine=this_machine(),
        values=values,
    )


def describe(apart: Differences) -> str:
    """The differences in words."""
    return (
        f"differences: loss {apart.loss:.1e}, advantages {apart.advantages:.1e}, gradients "
        f"{apart.gradient:.1e} (worst single tensor {apart.tensor:.1e})"
    )


def check(name: str, apart: Differences) -> None:
    """Raises EngineError if the differences are above `TOLERANCE`."""
    if not apart.largest <= TOLERANCE:
        raise EngineError(
            f"TRL and Slipstream compute different losses in the case {name}: {describe(apart)}; "
            f"allowed: {TOLERANCE:g}. Nothing is timed"
        )


def describe_updates(apart: UpdateDifferences) -> str:
    """The differences in words."""
    return (
        f"differences: gradient norms {apart.grad_norm:.1e}, weights {apart.update:.1e} of the "
        "distance that they moved"
    )


def check_updates(apart: UpdateDifferences) -> None:
    """Raises EngineError if the differences are above `UPDATE_TOLERANCE`."""
    if not (apart.update <= UPDATE_TOLERANCE and apart.grad_norm <= UPDATE_TOLERANCE):
        raise EngineError(
            f"TRL and Slipstream take different optimizer steps: {describe_updates(apart)}; "
            f"allowed: {UPDATE_TOLERANCE:g}. Nothing is timed"
        )


def _evaluate(
    bench: TrlBench, ran: Mapping[str, ContenderRun], folder: Path, say: Callable[[str], None]
) -> dict[str, list[float]]:
    """Scores on held-out problems by contender. Equal weights are evaluated once."""
    scores: dict[str, list[float]] = {}
    by_weights: dict[str, list[float]] = {}
    for name, one in ran.items():
        if one.weights and one.weights in by_weights:
            scores[name] = by_weights[one.weights]
            continue
        say(f"{name}: {bench.problems} held-out problems")
        scores[name] = evaluate(bench, one.folder, folder / f"{name}.jsonl", say)
        say(f"{name}: accuracy {fmean(scores[name]):.3f}")
        if one.weights:
            by_weights[one.weights] = scores[name]
    return scores


def evaluate(
    bench: TrlBench, policy: Path, output: Path, say: Callable[[str], None]
) -> list[float]:
    """One score per problem, from `slipstream eval` with the settings of the bench's policy."""
    run_line(
        [
            *(sys.executable, "-m", "slipstream.cli", "eval"),
            *("--config", str(bench.policy / CONFIG_FILE)),
            *("--checkpoint", str(policy_folder(policy))),
            *("--problems", str(bench.problems), "--output", str(output)),
            *dtype_settings(bench),
            f"trainer.num_threads={bench.threads}",
            "speculative.enable=false",
            "speculative.eagle.spec_model_path=null",
            "speculative.train.enable_drafter_training=false",
        ],
        say,
    )
    return [float(json.loads(line)["score"]) for line in output.read_text().splitlines()]


def training_row(
    bench: TrlBench,
    name: str,
    found: Mapping[str, Sequence[ContenderRun]],
    scores: Sequence[Sequence[float]],
    dtype: str,
    settings: Mapping[str, Any],
    versions: Mapping[str, str],
) -> ResultRow:
    """The row of the contender `name`. `found` are the runs of all contenders by round, `scores`
    its scores on held-out problems by round, and `versions` those of TRL's environment."""
    mine, plain = found[name], found[PLAIN]
    counted = slice(WARM_UP, bench.steps)
    seconds = [s for one in mine for s in one.seconds[counted]]
    above, error = step_ratio(seconds, [s for one in plain for s in one.seconds[counted]])
    tokens = [sum(step["tokens"] for step in one.steps[counted]) for one in mine]
    spent = [sum(one.seconds[counted]) for one in mine]
    values: dict[str, float | Spread] = {
        "median_step_by_round": Spread.of([_median(one.seconds[counted]) for one in mine]),
        "slipstream_speedup": above,
        "slipstream_speedup_error": error * above,
        "tokens_per_second": Spread.of([n / s for n, s in zip(tokens, spent, strict=True)]),
        "tokens_per_step": Spread.of([n / (bench.steps - WARM_UP) for n in tokens]),
    }
    for part in ("generation", "reward"):
        shares = [
            sum(step[part] for step in one.steps[counted]) / s
            for one, s in zip(mine, spent, strict=True)
        ]
        values[f"share_{part}"] = Spread.of(shares)
    values["tokens"] = Spread.of([one.total("tokens") for one in mine])
    values["steps"] = Spread.of([float(len(one.steps)) for one in mine])
    few = max(1, bench.steps // 10)
    values["reward_last"] = Spread.of(
        [fmean(step["reward_mean"] for step in one.steps[-few:]) for one in mine]
    )
    if scores:
        values["accuracy"] = Spread.of([fmean(of_seed) for of_seed in scores])
        # Seeds differ by more than the sampling error over problems.
        by_seed = [fmean(of_seed) for of_seed in scores]
        several = len(by_seed) > 1
        mean, low, high = mean_interval(by_seed) if several else accuracy_interval(scores[0])
        low, high = max(0.0, low), min(1.0, high)
        values |= {"accuracy_mean": mean, "accuracy_low": low, "accuracy_high": high}
    precision = name.removeprefix("trl-")
    return ResultRow(
        benchmark="trl",
        case="grpo step",
        contender=name,
        dtype=dtype if name == precision else precision,
        threads=bench.threads,
        seconds=Spread.of(seconds),
        machine=this_machine(None if name == precision else versions),
        values=values,
        settings={
            "policy": str(bench.policy),
            "steps": bench.steps,
            "rounds": bench.rounds,
            "problems": bench.problems,
            **{key: str(value) for key, value in settings.items()},
        },
    )


def _median(values: Sequence[float]) -> float:
    return Spread.of(values).median


def training_rows(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """The rows of contenders, without those of parity."""
    return [row for row in rows if row.case == "grpo step"]


def fastest(rows: Sequence[ResultRow]) -> ResultRow:
    """The row of TRL in the precision with the shortest step."""
    theirs_rows = [row for row in training_rows(rows) if row.contender.startswith("trl-")]
    return min(theirs_rows, key=lambda row: row.seconds.median)


def speedups(rows: Sequence[ResultRow]) -> dict[str, float]:
    """By contender of ours: the median step time of TRL's fastest over ours."""
    best = fastest(rows).seconds.median
    return {
        row.contender: best / row.seconds.median
        for row in training_rows(rows)
        if not row.contender.startswith("trl-")
    }


def summary(rows: Sequence[ResultRow]) -> dict[str, object]:
    """By name: the largest difference of the parity cases (None: no such rows); TRL's fastest
    precision; our speed over it, with and without drafts; and whether our held-out accuracy reaches
    TRL's interval (None: not measured)."""
    apart = [
        float(row.values[key])  # type: ignore[arg-type]
        for row in rows
        for key in ("loss_difference", "advantage_difference", "gradient_difference")
        if key in row.values
    ]
    best = fastest(rows)
    contenders = {row.contender: row for row in training_rows(rows)}
    plain = contenders[PLAIN]
    found: dict[str, object] = {
        "parity": max(apart, default=None),
        "fastest_peer": best.contender,
        "speedup": speedups(rows),
        "not_below": None,
    }
    if "accuracy_mean" in plain.values:
        lows = [
            float(row.values["accuracy_low"])  # type: ignore[arg-type]
            for name, row in contenders.items()
            if name.startswith("trl-")
        ]
        found["not_below"] = float(plain.values["accuracy_mean"]) >= max(lows)  # type: ignore[arg-type]
    return found


if __name__ == "__main__":
    from slipstream import cli

    sys.exit(cli.main(["bench", "trl", *sys.argv[1:]]))
