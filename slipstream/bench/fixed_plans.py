"""Fixed draft plans in turns of a few steps within one batch: what each takes, and what it yields.

The speed of a shared machine changes within seconds by more than plans differ by, so turns are as
short as may be. Which tokens come does not depend on what was drafted, so plans may change in the
middle of a response.

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
from slipstream.bench.speculation import SpeculationBench, check_same
from slipstream.bench.trained import (
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


class Turns:
    """`StrategySelector` of an engine that several contenders share: whose turn it is decides."""

    def __init__(self) -> None:
        self.whose: StrategySelector = PredefinedSelector(OFF)

    def begin_rollout(self, requests: int) -> int:
        return self.whose.begin_rollout(requests)

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

    def begin_rollout(self, requests: int) -> int:
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
class Batch:
    """A batch that was decoded: how long it took, and what was done."""

    seconds: float
    stats: EngineStats
    same: float
    """Share of the tokens that plain decoding wrote, in a batch of all candidates."""

    @classmethod
    def by(
        cls, bench: SpeculationBench, engine: Engine, batch: Responses, name: str = "a draft plan"
    ) -> Batch:
        """Raises EngineError where it does not write the batch's tokens (`check_same`)."""
        before, start = engine.stats(), perf_counter()
        written = [g.token_ids for g in engine.run(batch.requests)]
        seconds = perf_counter() - start
        same = check_same(bench, name, written, batch.tokens)
        return cls(seconds, engine.stats().since(before), same)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """A plan at one batch size: seconds of a step, and how many steps without drafts that is, with
    the standard error of its logarithm; tokens of a request in a step, with their standard
    error."""

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
        """Speed over steps without drafts."""
        return self.accept_length / self.steps_off


class FixedPlans:
    """The plans of a bench, drafted by one proposer and measured batch by batch."""

    def __init__(
        self, bench: SpeculationBench, trained: Trained, work: FullBatches, proposer: Proposer
    ) -> None:
        self.turns = Turns()
        self.engine = make_engine(trained, bench.dtype, proposer=proposer, selector=self.turns)
        self._bench = bench
        self._again = cycle(work.batches)
        # Of few requests it takes more steps to know what is accepted. A batch has few full steps
        # where drafts are long.
        self._wanted = bench.rounds * max(10, 400 // work.size)
        if bench.device.type == "cuda":
            self._warm_up()
        self._steps = _PlansInTurns(work.size, bench.in_grid)

    def _warm_up(self) -> None:
        """On a GPU: what a plan does often is recorded, and in turns with all others no plan
        does."""
        for plan in self._bench.in_grid:
            self.turns.whose, steps = PredefinedSelector(plan), 0
            while steps < RECORDED:
                batch = Batch.by(self._bench, self.engine, next(self._again))
                steps += batch.stats.decode_steps

    @property
    def known(self) -> bool:
        """Whether there are steps enough of every plan."""
        return min(map(len, self._steps.made.values())) >= self._wanted

    def decode(self) -> None:
        """One more batch."""
        self.turns.whose = self._steps
        Batch.by(self._bench, self.engine, next(self._again))

    def found(self) -> list[Fixed]:
        """What each plan did in steps of full batches."""
        plans, steps = self._bench.in_grid, self._steps
        whole = min(map(len, steps.seconds.values()))
        took = [[mean(turn or [np.nan]) for turn in steps.seconds[p][:whole]] for p in plans]
        logs, error = apart(np.log(took))
        return [
            Fixed(
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
    """As a contender."""
    return "off" if plan == OFF else str(plan)


def _standard_error(values: Sequence[float]) -> float:
    return float(stdev(values) / len(values) ** 0.5) if len(values) > 1 else 0.0


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
