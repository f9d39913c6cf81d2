"""Fixed draft plans, interleaved every few steps within one batch: time and tokens of a step.

The speed of a shared machine drifts within seconds by more than plans differ, so a plan has only a
few steps at a time. Drafts do not change the tokens, so the plan can change in the middle of a
response.

Used by `grid` and `tree_bound`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from math import exp
from statistics import mean, stdev
from time import perf_counter

import numpy as np
import numpy.typing as npt

from slipstream.bench.record import Spread
from slipstream.bench.speculation.rollout import SpeculationBench, check_same
from slipstream.bench.speculation.trained import (
    Responses,
    Trained,
    cut_to,
    make_engine,
    natural_responses,
)
from slipstream.inference.engine import Engine
from slipstream.inference.protocol import EngineStats
from slipstream.inference.speculation.plan import OFF, DraftPlan
from slipstream.inference.speculation.protocol import Proposer
from slipstream.inference.speculation.selector import (
    PredefinedSelector,
    StepRecord,
    StrategySelector,
)

STEPS_PER_TURN = 8
"""Consecutive steps of a plan before the next plan."""

SKIPPED_STEPS = 3
"""The first of these steps, which do not count: drafters catch up, and caches hold other data."""

CAPTURE_STEPS = 48
"""Consecutive steps of each plan on a GPU before the measurement, so that the engine captures its
CUDA graphs (`engine.graph_shapes.Habits`)."""

BATCH_TOKENS, LONGEST = 1024, 4
"""Responses of small batches are longer: `BATCH_TOKENS` tokens per batch, but at most `LONGEST`
times the usual length. Requests that start together end some steps apart, more so with deeper
drafts. If a batch had only ten steps, many of them would be steps of a smaller batch."""

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class FullBatches:
    """Batches of `size` responses of `length` tokens each."""

    size: int
    length: int
    batches: Sequence[Responses]


def workloads(
    bench: SpeculationBench, trained: Trained, say: Callable[[str], None]
) -> Iterator[FullBatches]:
    """Batches of each batch size of the bench, made from the policy's responses to its prompts."""
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
    """Tokens per response in batches of `size`; at most the length that `count` responses reach."""
    wanted = min(LONGEST * bench.new_tokens, BATCH_TOKENS // size)
    least = sorted(natural.lengths, reverse=True)[:count][-1]
    return max(bench.new_tokens, min(wanted, least))


class PlanSchedule:
    """`StrategySelector` of an engine that several contenders share. `current` decides."""

    def __init__(self) -> None:
        self.current: StrategySelector = PredefinedSelector(OFF)

    def begin_rollout(self, requests: int) -> int:
        return self.current.begin_rollout(requests)

    def select(self, running: int) -> DraftPlan:
        return self.current.select(running)

    def record(self, step: StepRecord) -> None:
        self.current.record(step)

    def changed(self, *, drafter: bool = False) -> None:
        self.current.changed(drafter=drafter)


class _InterleavedPlans:
    """`StrategySelector` that changes the plan every `STEPS_PER_TURN` steps, forwards and backwards
    through the list, and stores the times of steps with full batches of `size`."""

    def __init__(self, size: int, plans: Sequence[DraftPlan]) -> None:
        self._size = size
        self._order = cycle([*plans, *reversed(plans)])
        self._plan, self._steps = OFF, STEPS_PER_TURN
        # One list per visit of a plan.
        self.seconds: dict[DraftPlan, list[list[float]]] = {plan: [] for plan in plans}
        self.made: dict[DraftPlan, list[float]] = {plan: [] for plan in plans}
        """Tokens per request, by step."""

    def begin_rollout(self, requests: int) -> int:
        return 0

    def select(self, running: int) -> DraftPlan:
        if self._steps == STEPS_PER_TURN:
            self._plan, self._steps = next(self._order), 0
            self.seconds[self._plan].append([])
        self._steps += 1
        return self._plan

    def record(self, step: StepRecord) -> None:
        # At the end of a response there may be no room for the planned drafts.
        as_told = step.drawn == self._plan
        if self._steps > SKIPPED_STEPS and step.steady and step.running == self._size and as_told:
            self.seconds[self._plan][-1].append(step.seconds)
            self.made[self._plan].append(1 + sum(step.accepted) / step.running)

    def changed(self, *, drafter: bool = False) -> None:
        pass


@dataclass(frozen=True, slots=True)
class RequestBatch:
    """A decoded batch: its time and the engine's counts."""

    seconds: float
    stats: EngineStats
    same: float
    """Share of tokens that equal those of plain decoding, which decoded all candidates in one
    batch."""

    @classmethod
    def by(
        cls, bench: SpeculationBench, engine: Engine, batch: Responses, name: str = "a draft plan"
    ) -> RequestBatch:
        """Decode `batch`. Raises EngineError if its tokens differ from plain decoding's
        (`check_same`)."""
        before, start = engine.stats(), perf_counter()
        written = [g.token_ids for g in engine.run(batch.requests)]
        seconds = perf_counter() - start
        same = check_same(bench, name, written, batch.tokens)
        return cls(seconds, engine.stats().since(before), same)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """A plan at one batch size.

    `seconds` is the time of a step. `steps_off` is that time in steps without drafts, with the
    standard error of its logarithm. `accept_length` is the number of tokens per request and step,
    with its standard error.
    """

    plan: DraftPlan
    seconds: Spread
    steps_off: float
    steps_off_error: float
    accept_length: float
    accept_length_error: float

    @property
    def name(self) -> str:
        return name_of(self.plan)

    @property
    def over_off(self) -> float:
        """Speed over decoding without drafts in the same engine."""
        return self.accept_length / self.steps_off


class FixedPlans:
    """The plans of a bench, measured batch by batch with one draft proposer."""

    def __init__(
        self, bench: SpeculationBench, trained: Trained, work: FullBatches, proposer: Proposer
    ) -> None:
        self.schedule = PlanSchedule()
        self.engine = make_engine(trained, bench.dtype, proposer=proposer, selector=self.schedule)
        self._bench = bench
        self._again = cycle(work.batches)
        # With few requests, the mean accepted length needs more steps. With deep drafts, a batch
        # has few steps in which it is full.
        self._wanted = bench.rounds * max(10, 400 // work.size)
        if bench.device.type == "cuda":
            self._warm_up()
        self._steps = _InterleavedPlans(work.size, bench.grid_plans)

    def _warm_up(self) -> None:
        """Let a GPU engine capture CUDA graphs. It captures steps that are frequent, and no plan is
        frequent while plans are interleaved."""
        for plan in self._bench.grid_plans:
            self.schedule.current, steps = PredefinedSelector(plan), 0
            while steps < CAPTURE_STEPS:
                batch = RequestBatch.by(self._bench, self.engine, next(self._again))
                steps += batch.stats.decode_steps

    @property
    def known(self) -> bool:
        """Whether every plan has enough steps."""
        return min(map(len, self._steps.made.values())) >= self._wanted

    def decode(self) -> None:
        """Decode one more batch."""
        self.schedule.current = self._steps
        RequestBatch.by(self._bench, self.engine, next(self._again))

    def found(self) -> list[PlanResult]:
        """The result of each plan, from steps with full batches."""
        plans, steps = self._bench.grid_plans, self._steps
        whole = min(map(len, steps.seconds.values()))
        took = [[mean(turn or [np.nan]) for turn in steps.seconds[p][:whole]] for p in plans]
        logs, error = median_polish(np.log(took))
        return [
            PlanResult(
                plan=plan,
                seconds=Spread.of([s for turn in steps.seconds[plan] for s in turn]),
                steps_off=exp(longer - logs[0]),
                steps_off_error=error,
                accept_length=mean(steps.made[plan]),
                accept_length_error=_standard_error(steps.made[plan]),
            )
            for plan, longer in zip(plans, logs, strict=True)
        ]


def name_of(plan: DraftPlan) -> str:
    """The plan's name as a contender."""
    return "off" if plan == OFF else str(plan)


def _standard_error(values: Sequence[float]) -> float:
    return float(stdev(values) / len(values) ** 0.5) if len(values) > 1 else 0.0


def median_polish(logs: _Floats) -> tuple[list[float], float]:
    """The effect of each contender on `logs`, and the standard error of one effect.

    `logs` has the shape (contenders, turns), with nan for missing values. By median polish (Tukey
    1977): the effect of a contender is the median over turns of the values minus the effects of the
    turns, and the effect of a turn is the median over contenders of the values minus the effects of
    the contenders. A disturbed turn, or a single disturbed value, changes neither.
    """
    shared = np.zeros(logs.shape[1])
    for _ in range(10):
        own = np.nanmedian(logs - shared, 1)
        shared = np.nanmedian(logs - own[:, None], 0)
    left = np.abs(logs - shared - own[:, None])
    # For normally distributed values: the deviation from the median absolute deviation, then the
    # standard error of a median.
    deviation = 1.4826 * float(np.nanmedian(left))
    return own.tolist(), 1.2533 * deviation / logs.shape[1] ** 0.5
