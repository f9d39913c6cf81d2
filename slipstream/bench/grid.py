"""Depth of drafts by batch size, as FastRL's bench_sd, and how near the selector comes to the best.

The speed of a shared machine changes within seconds by more than plans differ by, so contenders
take turns as short as may be. Which tokens come does not depend on what was drafted: fixed plans
take turns of a few steps within one batch. A selector is what it has decoded before, so its turns
are whole batches, beside plain decoding, no drafts and the plan that was found best. All but plain
decoding share one engine: they compute in the same memory, and none is lucky in where it lies.

Used by `command`; policy and settings are those of `speculation`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from math import exp
from statistics import mean
from time import perf_counter

import numpy as np
import numpy.typing as npt

from slipstream.bench.record import Row, Spread, median_of
from slipstream.bench.speculation import (
    PLAIN,
    SpeculationBench,
    check_same,
    make_eagle,
    row_of,
)
from slipstream.bench.trained import (
    Responses,
    Trained,
    cut_to,
    load_trained,
    make_engine,
    natural_responses,
)
from slipstream.inference.engine import Engine
from slipstream.inference.protocol import EngineStats
from slipstream.inference.speculation.plan import OFF, DraftPlan
from slipstream.inference.speculation.selector import (
    CostModelSelector,
    PredefinedSelector,
    StepRecord,
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

TURN = 8
"""Steps of a fixed plan in a row."""

SETTLED = 3
"""Of these so many are not counted: drafters catch up, and caches hold what was there before."""

RECORDED = 48
"""Steps of a plan in a row before its turns on a GPU (`engine.graph_shapes.Habits`)."""

BATCH_TOKENS, LONGEST = 1024, 4
"""A batch of few requests makes so many tokens, but no response is more than so many times as long
as it usually is. Requests that begin together end some steps apart, the more so the deeper drafts
are: of ten steps that is much, and it says more about smaller batches than about this one."""

_Floats = npt.NDArray[np.float64]


def run_grid(bench: SpeculationBench, say: Callable[[str], None]) -> list[Row]:
    """For each batch size a row for plain decoding, each plan and the selector: of `LEARNERS` of
    them the mean, each of which has decoded `LEARNED` steps of that size before. Without selectors
    a row for each plan, over steps without drafts of the same engine."""
    trained = load_trained(bench.policy, bench.device, bench.candidates)
    rows: list[Row] = []
    for work in workloads(bench, trained, say):
        turns, size, length, batches = Turns(), work.size, work.length, work.batches
        drafting = make_engine(
            trained, bench.dtype, proposer=make_eagle(trained, bench.dtype), selector=turns
        )
        fixed = fixed_plans(bench, size, drafting, turns, batches)
        if not bench.selectors:
            rows += [
                fixed_row(bench, size, length, plan, OVER_OFF, plan.over_off) for plan in fixed
            ]
            say(grid_table(rows))
            continue
        plain = make_engine(trained, bench.dtype)
        found = _beside_the_best(bench, size, length, fixed, plain, drafting, turns, batches)
        say(f"{grid_table(found)}\n{_summary(found)}")
        rows += found
    return rows


@dataclass(frozen=True, slots=True)
class FullBatches:
    """Batches of `size` responses of `length` tokens each."""

    size: int
    length: int
    batches: Sequence[Responses]


def workloads(
    bench: SpeculationBench, trained: Trained, say: Callable[[str], None]
) -> Iterator[FullBatches]:
    """Of each of the bench's batch sizes, from what the policy writes to its prompts."""
    natural = natural_responses(trained, bench.temperature, bench.dtype)
    for size in bench.batches:
        count = max(2 * size, bench.least_responses // size * size)
        length = _length(bench, natural, size, count)
        pool = cut_to(natural, count, length)
        say(f"batch {size}, responses of {length}")
        batches = [
            Responses(pool.requests[i : i + size], pool.tokens[i : i + size])
            for i in range(0, count, size)
        ]
        yield FullBatches(size, length, batches)


def _length(bench: SpeculationBench, natural: Responses, size: int, count: int) -> int:
    """Tokens of a response in batches of `size`: as many as `count` of them have, where that is
    less."""
    wanted = min(LONGEST * bench.new_tokens, BATCH_TOKENS // size)
    least = sorted(natural.lengths, reverse=True)[:count][-1]
    return max(bench.new_tokens, min(wanted, least))


def _summary(rows: Sequence[Row]) -> str:
    """What came out for one batch size, for whoever waits for the others."""
    *fixed, mine = rows
    best = max(fixed, key=lambda row: median_of(row.values["over_plain"]))
    return (
        f"  steps: {best.contender} {median_of(best.values['over_plain']):.2f} over plain; whole "
        f"batches: selector {median_of(mine.values['over_plain']):.2f}, "
        f"{median_of(mine.values['over_best_fixed']):.3f} of that plan"
    )


def grid_table(rows: Sequence[Row]) -> str:
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


def over_of(rows: Sequence[Row]) -> str:
    """Which of `OVER_PLAIN` and `OVER_OFF` the rows of plans have."""
    return OVER_OFF if any(OVER_OFF in row.values for row in rows) else OVER_PLAIN


class Turns:
    """`StrategySelector` of an engine that several contenders share: whose turn it is decides."""

    def __init__(self) -> None:
        self.whose: StrategySelector = PredefinedSelector(OFF)

    def begins(self, requests: int) -> int:
        return self.whose.begins(requests)

    def select(self, running: int) -> DraftPlan:
        return self.whose.select(running)

    def record(self, step: StepRecord) -> None:
        self.whose.record(step)

    def changed(self, *, drafter: bool = False) -> None:
        self.whose.changed(drafter=drafter)


class _PlansInTurns:
    """`StrategySelector` by which plans take turns of `TURN` steps, there and back, and which keeps
    what full batches of `size` took."""

    def __init__(self, size: int, plans: Sequence[DraftPlan]) -> None:
        self._size = size
        self._order = cycle([*plans, *reversed(plans)])
        self._plan, self._steps = OFF, TURN
        # A list for each turn.
        self.seconds: dict[DraftPlan, list[list[float]]] = {plan: [] for plan in plans}
        self.made: dict[DraftPlan, list[float]] = {plan: [] for plan in plans}
        """Tokens of a request, by step."""

    def begins(self, requests: int) -> int:
        return 0

    def select(self, running: int) -> DraftPlan:
        if self._steps == TURN:
            self._plan, self._steps = next(self._order), 0
            self.seconds[self._plan].append([])
        self._steps += 1
        return self._plan

    def record(self, step: StepRecord) -> None:
        # Where there is no room for drafts, none are made.
        as_told = step.drawn == self._plan
        if self._steps > SETTLED and step.steady and step.running == self._size and as_told:
            self.seconds[self._plan][-1].append(step.seconds)
            self.made[self._plan].append(1 + sum(step.accepted) / step.running)

    def changed(self, *, drafter: bool = False) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _Batch:
    """A batch that was decoded: how long it took, and what was done."""

    seconds: float
    stats: EngineStats
    same: float
    """Share of the tokens that plain decoding wrote, in a batch of all candidates."""

    @classmethod
    def by(
        cls, bench: SpeculationBench, engine: Engine, batch: Responses, name: str = "a draft plan"
    ) -> _Batch:
        """Raises EngineError where it does not write the batch's tokens (`check_same`)."""
        before, start = engine.stats(), perf_counter()
        written = [g.token_ids for g in engine.run(batch.requests)]
        seconds = perf_counter() - start
        same = check_same(bench, name, written, batch.tokens)
        return cls(seconds, engine.stats().since(before), same)


@dataclass(frozen=True, slots=True)
class Fixed:
    """A plan at one batch size: seconds of a step, speed over no drafts, tokens a step."""

    plan: DraftPlan
    seconds: Spread
    over_off: float
    accept_length: float

    @property
    def name(self) -> str:
        return _name(self.plan)


def _warm_up(
    bench: SpeculationBench,
    engine: Engine,
    turns: Turns,
    again: Iterator[Responses],
) -> None:
    """On a GPU: what a plan does often is recorded, and in turns with all others no plan does."""
    for plan in bench.in_grid:
        turns.whose, steps = PredefinedSelector(plan), 0
        while steps < RECORDED:
            steps += _Batch.by(bench, engine, next(again)).stats.decode_steps


def fixed_plans(
    bench: SpeculationBench, size: int, engine: Engine, turns: Turns, batches: Sequence[Responses]
) -> list[Fixed]:
    """What each plan of the bench does in steps of full batches, all in turns, in an engine by
    whose `turns` plans are chosen."""
    # Of few requests it takes more steps to know what is accepted. A batch has few full steps where
    # drafts are long.
    wanted = bench.rounds * max(10, 400 // size)
    plans, again = bench.in_grid, cycle(batches)
    if bench.device.type == "cuda":
        _warm_up(bench, engine, turns, again)
    found = turns.whose = _PlansInTurns(size, plans)
    while min(map(len, found.made.values())) < wanted:
        _Batch.by(bench, engine, next(again))
    whole = min(map(len, found.seconds.values()))
    took = [[mean(turn or [np.nan]) for turn in found.seconds[p][:whole]] for p in plans]
    logs, _ = apart(np.log(took))
    made = {plan: mean(found.made[plan]) for plan in plans}
    return [
        Fixed(
            plan=plan,
            seconds=Spread.of([s for turn in found.seconds[plan] for s in turn]),
            over_off=made[plan] / exp(longer - logs[0]),
            accept_length=made[plan],
        )
        for plan, longer in zip(plans, logs, strict=True)
    ]


def fixed_row(
    bench: SpeculationBench, size: int, length: int, plan: Fixed, over: str, times: float
) -> Row:
    """Of a plan that is `times` as fast as what `over` names."""
    values = {over: times, "accept_length": plan.accept_length}
    case = f"batch {size}"
    return row_of(bench, case, plan.name, plan.seconds, values, new_tokens=length)


def _beside_the_best(
    bench: SpeculationBench,
    size: int,
    length: int,
    fixed: Sequence[Fixed],
    plain: Engine,
    drafting: Engine,
    turns: Turns,
    batches: Sequence[Responses],
) -> list[Row]:
    best = max(fixed, key=lambda f: f.over_off)
    # The first time takes memory, and on a GPU recordings.
    for batch in batches:
        _Batch.by(bench, plain, batch, PLAIN)
    learners = {f"{SELECTOR} {i}": CostModelSelector(bench.in_grid) for i in range(LEARNERS)}
    for turns.whose in learners.values():
        again, steps = cycle(batches), 0
        while steps < LEARNED:
            steps += _Batch.by(bench, drafting, next(again)).stats.decode_steps
    strategies: dict[str, StrategySelector] = {
        _name(plan): PredefinedSelector(plan) for plan in dict.fromkeys([OFF, best.plan])
    }
    strategies |= learners
    names = [PLAIN, *strategies]
    done: dict[str, list[_Batch]] = {name: [] for name in names}
    for number, batch in enumerate(islice(cycle(batches), bench.rounds * max(8, 32 // size))):
        first = number // 2 % len(names)
        order = names[first:] + names[:first]
        for name in order if number % 2 == 0 else reversed(order):
            turns.whose = strategies.get(name, turns.whose)
            engine = plain if name == PLAIN else drafting
            done[name].append(_Batch.by(bench, engine, batch, name))
    logs, error = apart(np.log([[b.seconds for b in done[name]] for name in names]))
    longer = dict(zip(names, logs, strict=True))
    learned = mean(longer[name] for name in learners)
    off_over_plain = exp(longer[PLAIN] - longer[_name(OFF)])

    def row(name: str, seconds: Spread, **values: float | Spread) -> Row:
        return row_of(bench, f"batch {size}", name, seconds, values, new_tokens=length)

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
            fixed_row(bench, size, length, plan, OVER_PLAIN, off_over_plain * plan.over_off)
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


def apart(logs: _Floats) -> tuple[list[float], float]:
    """How much each contender's logarithms are apart from those that all share a turn with, and the
    standard error of one. `logs` is (contenders, turns), nan where there is none.

    By median polish (Tukey 1977): a contender's own is the median over turns of what is left
    without what the turn's share, and that is the median over contenders of what is left without
    their own. A disturbed turn, or one contender's in it, moves neither.
    """
    shared = np.zeros(logs.shape[1])
    for _ in range(10):
        own = np.nanmedian(logs - shared, 1)
        shared = np.nanmedian(logs - own[:, None], 0)
    left = np.abs(logs - shared - own[:, None])
    # Of what is spread normally: the deviation by the median one, and the error of a median.
    deviation = 1.4826 * float(np.nanmedian(left))
    return own.tolist(), 1.2533 * deviation / logs.shape[1] ** 0.5


def _spread(batches: Sequence[_Batch]) -> Spread:
    return Spread.of([batch.seconds for batch in batches])


def _name(plan: DraftPlan) -> str:
    return "off" if plan == OFF else str(plan)
