"""Depth of drafts by batch size, as FastRL's bench_sd, and how near the selector comes to the best.

Fixed plans take turns of a few steps (`fixed_plans`). A selector is what it has decoded before, so
its turns are whole batches, beside plain decoding, no drafts and the plan that was found best. All
but plain decoding share one engine: they compute in the same memory, and none is lucky in where it
lies.

Used by `command`; policy and settings are those of `speculation`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle, islice
from math import exp
from statistics import mean

import numpy as np

from slipstream.bench.record import ResultRow, Spread, median_of
from slipstream.bench.speculation.fixed_plans import (
    Fixed,
    FixedPlans,
    FullBatches,
    RequestBatch,
    apart,
    name_of,
    workloads,
)
from slipstream.bench.speculation.rollout import PLAIN, SpeculationBench, make_eagle, row_of
from slipstream.bench.speculation.trained import load_trained, make_engine
from slipstream.inference.engine import Engine
from slipstream.inference.speculation.plan import OFF
from slipstream.inference.speculation.selector import (
    CostModelSelector,
    PredefinedSelector,
    StrategySelector,
)

SELECTOR = "selector"

OVER_PLAIN, OVER_OFF = "over_plain", "over_off"
"""What a row's speed is over: an engine that never drafts, or steps without drafts of one that
does, and keeps features for them."""

LEARNERS = 3
"""Selectors that learn by themselves: one may be lucky in what it sees first."""

LEARNED = 1000
"""Steps that each of them has decoded before it is measured: a run has as many in a minute."""


def run_grid(bench: SpeculationBench, say: Callable[[str], None]) -> list[ResultRow]:
    """For each batch size a row for plain decoding, each plan and the selector: of `LEARNERS` of
    them the mean, each of which has decoded `LEARNED` steps of that size before. Without selectors
    a row for each plan, over steps without drafts of the same engine."""
    trained = load_trained(bench.policy, bench.device, bench.candidates)
    rows: list[ResultRow] = []
    for work in workloads(bench, trained, say):
        plans = FixedPlans(bench, trained, work, make_eagle(trained, bench.dtype))
        while not plans.known:
            plans.decode()
        fixed = plans.found()
        if not bench.selectors:
            rows += [over_off_row(bench, work, plan) for plan in fixed]
            say(grid_table(rows))
            continue
        plain = make_engine(trained, bench.dtype)
        found = _beside_the_best(bench, work, fixed, plain, plans)
        say(f"{grid_table(found)}\n{_summary(found)}")
        rows += found
    return rows


def _summary(rows: Sequence[ResultRow]) -> str:
    """What came out for one batch size, for whoever waits for the others."""
    *fixed, mine = rows
    best = max(fixed, key=lambda row: median_of(row.values["over_plain"]))
    return (
        f"  steps: {best.contender} {median_of(best.values['over_plain']):.2f} over plain; whole "
        f"batches: selector {median_of(mine.values['over_plain']):.2f}, "
        f"{median_of(mine.values['over_best_fixed']):.3f} of that plan"
    )


def grid_table(rows: Sequence[ResultRow]) -> str:
    """Speed over plain decoding by plan and batch size, in steps of full batches; and in whole
    batches, from prompts to the last that ends, that of the best plan and of the selector, and what
    this yields of the best."""
    cases = list(dict.fromkeys(row.case for row in rows))
    names = [name for name in dict.fromkeys(row.contender for row in rows) if name != SELECTOR]
    by_cell = {(row.case, row.contender): row.values for row in rows}
    heading = "".join(f"{name:>9}" for name in names)
    if (cases[0], SELECTOR) in by_cell:
        heading += "   whole: best  selector   of the best"
    over = over_of(rows)
    lines = [f"  {'over plain' if over == OVER_PLAIN else 'over off':<12}{heading}"]
    for case in cases:
        cells = "".join(f"{by_cell[case, name][over]:9.2f}" for name in names)
        mine = by_cell.get((case, SELECTOR))
        if mine is None:
            lines.append(f"  {case:<12}{cells}")
            continue
        whole = f"{mine['best_over_plain']:14.2f}{mine['over_plain']:10.2f}"
        share = f"{mine['over_best_fixed']:8.3f} ±{mine['standard_error']:.3f}"
        lines.append(f"  {case:<12}{cells}{whole}{share}")
    return "\n".join(lines)


def over_of(rows: Sequence[ResultRow]) -> str:
    """Which of `OVER_PLAIN` and `OVER_OFF` the rows of plans have."""
    return OVER_OFF if any(OVER_OFF in row.values for row in rows) else OVER_PLAIN


def over_off_row(bench: SpeculationBench, work: FullBatches, plan: Fixed) -> ResultRow:
    """Of a plan beside steps without drafts of the same engine, with standard errors."""
    return _fixed_row(
        bench,
        work,
        plan,
        over_off=plan.over_off,
        steps_off_error=plan.steps_off_error,
        accept_length_error=plan.accept_length_error,
    )


def _fixed_row(
    bench: SpeculationBench, work: FullBatches, plan: Fixed, **values: float
) -> ResultRow:
    values["accept_length"] = plan.accept_length
    case = f"batch {work.size}"
    return row_of(bench, case, plan.name, plan.seconds, values, new_tokens=work.length)


def _beside_the_best(
    bench: SpeculationBench,
    work: FullBatches,
    fixed: Sequence[Fixed],
    plain: Engine,
    plans: FixedPlans,
) -> list[ResultRow]:
    size, batches, drafting, turns = work.size, work.batches, plans.engine, plans.turns
    best = max(fixed, key=lambda f: f.over_off)
    # The first time takes memory, and on a GPU recordings.
    for batch in batches:
        RequestBatch.by(bench, plain, batch, PLAIN)
    learners = {f"{SELECTOR} {i}": CostModelSelector(bench.in_grid) for i in range(LEARNERS)}
    for turns.whose in learners.values():
        again, steps = cycle(batches), 0
        while steps < LEARNED:
            steps += RequestBatch.by(bench, drafting, next(again)).stats.decode_steps
    strategies: dict[str, StrategySelector] = {
        name_of(plan): PredefinedSelector(plan) for plan in dict.fromkeys([OFF, best.plan])
    }
    strategies |= learners
    names = [PLAIN, *strategies]
    done: dict[str, list[RequestBatch]] = {name: [] for name in names}
    for number, batch in enumerate(islice(cycle(batches), bench.rounds * max(8, 32 // size))):
        first = number // 2 % len(names)
        order = names[first:] + names[:first]
        for name in order if number % 2 == 0 else reversed(order):
            turns.whose = strategies.get(name, turns.whose)
            engine = plain if name == PLAIN else drafting
            done[name].append(RequestBatch.by(bench, engine, batch, name))
    logs, error = apart(np.log([[b.seconds for b in done[name]] for name in names]))
    longer = dict(zip(names, logs, strict=True))
    learned = mean(longer[name] for name in learners)
    off_over_plain = exp(longer[PLAIN] - longer[name_of(OFF)])

    def row(name: str, seconds: Spread, **values: float | Spread) -> ResultRow:
        return row_of(bench, f"batch {size}", name, seconds, values, new_tokens=work.length)

    mine = [batch for name in learners for batch in done[name]]
    return [
        row(
            PLAIN,
            _spread(done[PLAIN]),
            over_plain=1.0,
            accept_length=1.0,
            same_tokens=mean(b.same for b in done[PLAIN]),
        ),
        *(
            _fixed_row(bench, work, plan, over_plain=off_over_plain * plan.over_off)
            for plan in fixed
        ),
        row(
            SELECTOR,
            _spread(mine),
            over_plain=exp(longer[PLAIN] - learned),
            best_over_plain=exp(longer[PLAIN] - longer[best.name]),
            over_best_fixed=exp(longer[best.name] - learned),
            # Of the difference of one contender from the mean of the learners.
            standard_error=error * (1 + 1 / LEARNERS) ** 0.5,
            accept_length=mean(b.stats.accept_length for b in mine),
            on_fraction=mean(b.stats.on_fraction for b in mine),
            same_tokens=mean(b.same for b in mine),
        ),
    ]


def _spread(batches: Sequence[RequestBatch]) -> Spread:
    return Spread.of([batch.seconds for batch in batches])
