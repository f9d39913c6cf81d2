"""TRL's GRPO against ours: the same model, prompts, lengths and settings (`slipstream bench trl`).

First what is computed: of one batch both must have the same loss and gradients, and after several
optimizer steps on given batches the same weights (`trl_parity`), or nothing is timed. Then
training, in turns of a step (`turns`), each contender a process of its own:

    plain               Slipstream without drafts
    speculation         Slipstream with the draft head as it is, where the policy has one
    trl-PRECISION       TRL, generating by transformers' `generate`; see `PRECISIONS`

A turn's time is taken here, for all alike. Ours end after the steps asked for; TRL goes on until it
has sampled as many tokens as ours, so that the policies that come out can be compared on held-out
problems, by one evaluator. Every round is another seed; of several, an accuracy's interval is that
of its mean over seeds. Drafts change no token: where the policy is the same to the last bit it is
evaluated once.
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
"""Optimizer steps of which the weights are compared."""

SPEED_GOAL = 1.5
"""Our step over TRL's that the project promises, TRL in its fastest precision."""


def run(bench: TrlBench, say: Callable[[str], None]) -> list[ResultRow]:
    """Measure: a row for each case of parity, then one for each contender. Raises ConfigError where
    TRL is not installed, EngineError where parity fails or a run does."""
    trl = trl_command()
    config = compose(bench)
    settings = trl_settings(config)
    model = start_of(bench.policy)
    rows = run_parity(config, settings, model, trl, bench.threads, say)
    dtype = str(dtype_from_name(config.actor_rollout_ref.actor.dtype, torch.device("cpu")))
    dtype = dtype.removeprefix("torch.")
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
        _row(bench, name, found, accuracies.get(name, []), dtype, settings, versions)
        for name in found
    ]


def run_parity(
    config: Config,
    settings: Mapping[str, Any],
    model: Path,
    trl: Sequence[str],
    threads: int,
    say: Callable[[str], None],
) -> list[ResultRow]:
    """A row for each case, and one for `UPDATES` optimizer steps with `settings`.

    Raises EngineError where one is further apart than `TOLERANCE` or `UPDATE_TOLERANCE`.
    """
    task = task_of(config, model)
    batch = make_batch(task, task.tokenizer)
    old = old_log_probs(model, batch)
    rows = []
    with PeerProcess("trl, parity", trl) as process:
        for case in CASES:
            given = old if case.off_policy else None
            start = time.perf_counter()
            answer = theirs(process, model, batch, case, given, threads)
            seconds = time.perf_counter() - start
            apart = differences(ours(model, batch, case, given), answer)
            say(f"parity, {case.name}: {said(apart)}")
            check(case.name, apart)
            values = {
                "loss_difference": apart.loss,
                "advantage_difference": apart.advantages,
                "gradient_difference": apart.gradient,
                "tensor_difference": apart.tensor,
            }
            rows.append(_parity_row(case.name, values, seconds, threads))
    steps = [make_batch(task, task.tokenizer, first=100 * step) for step in range(UPDATES)]
    # Another process: TRL reads the number of threads once, and keeps what it has trained.
    with PeerProcess("trl, updates", trl) as process:
        start = time.perf_counter()
        answered = their_updates(process, model, steps, settings, threads)
        seconds = time.perf_counter() - start
    moved = update_differences(model, our_updates(model, steps, settings), answered)
    norms = ", ".join(f"{norm:.3g}" for norm in answered.grad_norms)
    say(f"parity, {UPDATES} steps with gradients of norms {norms}: {said_of_updates(moved)}")
    check_updates(moved)
    values = {"grad_norm_difference": moved.grad_norm, "update_difference": moved.update}
    return [*rows, _parity_row(f"{UPDATES} steps", values, seconds, threads)]


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


def said(apart: Differences) -> str:
    """In words."""
    return (
        f"loss {apart.loss:.1e}, advantages {apart.advantages:.1e}, gradients {apart.gradient:.1e} "
        f"apart (the worst tensor by itself {apart.tensor:.1e})"
    )


def check(name: str, apart: Differences) -> None:
    """Raises EngineError where both do not compute the same."""
    if not apart.largest <= TOLERANCE:
        raise EngineError(
            f"TRL's loss is not ours in the case {name}: {said(apart)}, where {TOLERANCE:g} is "
            "allowed; what is not the same is not timed"
        )


def said_of_updates(apart: UpdateDifferences) -> str:
    """In words."""
    return (
        f"norms {apart.grad_norm:.1e} apart, weights {apart.update:.1e} of the way that they went"
    )


def check_updates(apart: UpdateDifferences) -> None:
    """Raises EngineError where both do not take the same steps."""
    if not (apart.update <= UPDATE_TOLERANCE and apart.grad_norm <= UPDATE_TOLERANCE):
        raise EngineError(
            f"TRL's optimizer steps are not ours: {said_of_updates(apart)}, where "
            f"{UPDATE_TOLERANCE:g} is allowed; what is not the same is not timed"
        )


def _evaluate(
    bench: TrlBench, ran: Mapping[str, ContenderRun], folder: Path, say: Callable[[str], None]
) -> dict[str, list[float]]:
    """Scores on held-out problems by contender; the same weights are evaluated once."""
    scores: dict[str, list[float]] = {}
    by_weights: dict[str, list[float]] = {}
    for name, one in ran.items():
        if one.weights and one.weights in by_weights:
            scores[name] = by_weights[one.weights]
            continue
        say(f"{name}: {bench.problems} held-out problems")
        scores[name] = evaluate(bench, one.folder, folder / f"{name}.jsonl", say)
        say(f"{name}: {fmean(scores[name]):.3f} of them right")
        if one.weights:
            by_weights[one.weights] = scores[name]
    return scores


def evaluate(
    bench: TrlBench, policy: Path, output: Path, say: Callable[[str], None]
) -> list[float]:
    """One score a problem, by `slipstream eval` with the settings of the bench's policy."""
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


def _row(
    bench: TrlBench,
    name: str,
    found: Mapping[str, Sequence[ContenderRun]],
    scores: Sequence[Sequence[float]],
    dtype: str,
    settings: Mapping[str, Any],
    versions: Mapping[str, str],
) -> ResultRow:
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
        # Trainings from other seeds differ by more than the problems do by chance.
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
    """Those of contenders."""
    return [row for row in rows if row.case == "grpo step"]


def fastest(rows: Sequence[ResultRow]) -> ResultRow:
    """TRL in the precision with the shortest step."""
    theirs_rows = [row for row in training_rows(rows) if row.contender.startswith("trl-")]
    return min(theirs_rows, key=lambda row: row.seconds.median)


def speedups(rows: Sequence[ResultRow]) -> dict[str, float]:
    """Median step of TRL's fastest over ours, without drafts and with them."""
    best = fastest(rows).seconds.median
    return {
        row.contender: best / row.seconds.median
        for row in training_rows(rows)
        if not row.contender.startswith("trl-")
    }


def summary(rows: Sequence[ResultRow]) -> dict[str, object]:
    """By name: the largest difference of the parity cases (None: not among the rows), our speed
    over TRL's fastest, with drafts and without, and whether our held-out accuracy reaches TRL's
    interval (None: not measured)."""
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
