"""Draft heads of one policy against each other (`slipstream bench speculation --heads A B`).

What each took to train, as its run's folder says, and, all heads in turns, how many tokens a
verification of each plan gives and what is gained over plain decoding, by batch size; beside fixed
plans the selector, which is what a run has. Which of two heads is the better one depends on all of
it: a step of EAGLE-3's training takes several times as long as one of EAGLE-1's.

Used by `command`; settings are those of `speculation`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slipstream.bench.record import ResultRow, Spread, median_of
from slipstream.bench.speculation.grid import SELECTOR
from slipstream.bench.speculation.rollout import (
    PLAIN,
    Generator,
    SpeculationBench,
    chains,
    check_same,
    make_eagle,
    plans,
    row_of,
)
from slipstream.bench.speculation.trained import (
    Trained,
    cut_to,
    load_trained,
    make_engine,
    natural_responses,
)
from slipstream.bench.timing import alternate, ratio
from slipstream.checkpoint.layout import head_folder
from slipstream.errors import ConfigError
from slipstream.inference.engine import Engine
from slipstream.inference.speculation.plan import DraftPlan
from slipstream.inference.speculation.selector import CostModelSelector
from slipstream.metrics.loggers import METRICS_FILE, read_jsonl
from slipstream.models.draft.files import load_draft_head

PLANS = tuple(map(DraftPlan.chain, (1, 3, 5, 7)))

WARM_UP = 2
"""Rounds that are not counted: kernels are compiled, and the selector measures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Steps that a head was trained for, and what they took, with the responses for them."""

    steps: int
    seconds: float


def run_heads(
    bench: SpeculationBench,
    heads: Sequence[Path],
    say: Callable[[str], None],
    fixed: Sequence[DraftPlan] = PLANS,
) -> list[ResultRow]:
    """For each batch size a row for plain decoding, and for each of the folders `heads` one for
    each plan and one for the selector, which has trees to choose from where `fixed` has any.

    Raises ConfigError for a head or a plan that is named twice, CheckpointError for a folder that
    is no head of the policy, EngineError where one writes other tokens than plain decoding.
    """
    for what, named in (("--heads", heads), ("--plan", fixed)):
        if not named or len(set(named)) < len(named):
            raise ConfigError(f"{what} {' '.join(map(str, named))}: name each once")
    trained = load_trained(bench.policy, bench.device, bench.candidates)
    config = trained.decoder.config
    theirs = {
        str(folder): replace(
            trained, head=load_draft_head(head_folder(folder), config).to(bench.device)
        )
        for folder in heads
    }
    took = {str(folder): training_of(folder) for folder in heads}
    natural = natural_responses(trained, bench.temperature, bench.dtype)
    pool = cut_to(natural, max(*bench.batches, bench.least_responses), bench.new_tokens)
    rows = []
    for size in bench.batches:
        say(f"batch {size}: {len(heads)} heads, {len(fixed)} plans each and the selector, in turns")
        count = max(size, bench.least_responses // size * size)
        batches = [pool.requests[i : i + size] for i in range(0, count, size)]
        generators = {(PLAIN, ""): Generator(make_engine(trained, bench.dtype), batches)}
        for name, one in theirs.items():
            for how, engine in _engines(one, bench, fixed):
                generators[name, how] = Generator(engine, batches)
        rows += _interleaved(bench, size, generators, theirs, took)
    return rows


def training_of(folder: Path) -> Training | None:
    """Of the head that lies in a run's folder, or in `draft` there; None where nothing is recorded.

    Raises CheckpointError where the record cannot be read.
    """
    for file in (folder / "draft" / METRICS_FILE, folder / METRICS_FILE):
        if file.is_file():
            break
    else:
        return None
    # Before the first step the head is only measured, and a run's own file has no losses of a head.
    steps = (metrics for _, metrics in read_jsonl(file) if "draft/loss" in metrics)
    seconds = [metrics["timing_s/step"] for metrics in steps]
    return Training(steps=len(seconds), seconds=sum(seconds)) if seconds else None


def heads_table(rows: Sequence[ResultRow]) -> str:
    """What each head took to train, tokens a verification by plan, and speed over plain decoding by
    plan and batch size."""
    rows = [row for row in rows if row.contender != PLAIN]
    names = list(dict.fromkeys(row.contender for row in rows))
    hows = list(dict.fromkeys(str(row.settings["plan"]) for row in rows))
    cases = list(dict.fromkeys(row.case for row in rows))
    cells = {(row.contender, row.case, row.settings["plan"]): row for row in rows}
    lines = []
    for name in names:
        some = cells[name, cases[0], hows[0]]
        steps = some.values.get("training_steps")
        seconds = some.values.get("training_seconds")
        known = "training not recorded"
        if steps is not None and seconds is not None:
            known = f"{steps:,} steps of training in {median_of(seconds):,.0f} s"
        lines.append(f"  {name}: {some.settings['algorithm']}, {known}")
        lines.append(f"    {'':<24}" + "".join(f"{how:>10}" for how in hows))
        for what, shown in (("accept_length", "tokens/verification"), ("over_plain", "over plain")):
            for case in cases:
                found = (median_of(cells[name, case, how].values[what]) for how in hows)
                label = f"{shown}, {case.removeprefix('batch ')}"
                lines.append(f"    {label:<24}" + "".join(f"{value:10.2f}" for value in found))
    return "\n".join(lines)


def _engines(
    one: Trained, bench: SpeculationBench, fixed: Sequence[DraftPlan]
) -> Iterable[tuple[str, Engine]]:
    """One for each plan and one for the selector, each with a drafter of its own."""
    for plan in fixed:
        proposer = make_eagle(one, bench.dtype)
        yield str(plan), make_engine(one, bench.dtype, proposer=proposer, plan=plan)
    trees = any(plan.topk > 1 for plan in fixed)
    selector = CostModelSelector(plans() if trees else chains())
    proposer = make_eagle(one, bench.dtype)
    yield SELECTOR, make_engine(one, bench.dtype, proposer=proposer, selector=selector)


def _interleaved(
    bench: SpeculationBench,
    size: int,
    generators: Mapping[tuple[str, str], Generator],
    theirs: Mapping[str, Trained],
    took: Mapping[str, Training | None],
) -> list[ResultRow]:
    keys = {" ".join(key): key for key in generators}
    calls = {joined: generators[key] for joined, key in keys.items()}
    times = alternate(calls, rounds=bench.rounds, warm_up=WARM_UP)
    plain = calls[f"{PLAIN} "]
    tokens = sum(map(len, plain.tokens))
    rows = []
    for joined, (name, how) in keys.items():
        wall = times[joined].wall
        same = check_same(bench, joined, calls[joined].tokens, plain.tokens)
        values: dict[str, float | Spread] = {
            "tokens_per_second": Spread.of([tokens / seconds for seconds in wall]),
            "over_plain": ratio(times[f"{PLAIN} "].wall, wall),
            "accept_length": Spread.of(
                [stats.accept_length for stats in calls[joined].stats[-bench.rounds :]]
            ),
        }
        values["same_tokens"] = same
        training = took.get(name)
        if training is not None:
            values |= {"training_steps": training.steps, "training_seconds": training.seconds}
        row = row_of(
            bench, f"batch {size}", name, Spread.of(wall), values, new_tokens=bench.new_tokens
        )
        if name in theirs:
            about = {"plan": how, "algorithm": theirs[name].head.algorithm}
            row = replace(row, settings={**row.settings, **about})
        rows.append(row)
    return rows
