"""Simulators for selectors of draft plans: synthetic machines and policies, where every plan's cost
and acceptance are known, and replays of recorded traces, where they are estimated.

A synthetic tree accepts by its nodes. The first child of a node has the acceptance rate of a
chain's draft; each further sibling has `second` times this rate, of the probability that all before
it are rejected. The tree is EAGLE-2's: `topk` nodes of a level are expanded, and the candidates
with the highest probabilities are verified. `FAIR` and `SECOND` are fitted to eight plans with the
quickstart's head and match each within 4 % (docs/log/trees.md).

Used by `regret`.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from operator import mul
from statistics import fmean, median

from slipstream.bench.speculation.rollout import chains
from slipstream.bench.speculation.rollout import plans as all_plans
from slipstream.errors import ConfigError
from slipstream.inference.speculation.acceptance import AcceptanceCurve
from slipstream.inference.speculation.costs import StepCosts
from slipstream.inference.speculation.plan import OFF, DraftPlan
from slipstream.inference.speculation.report import read_trace
from slipstream.inference.speculation.selector import StepRecord, bucket_of

FAIR = (0.87, 0.83, 0.76, 0.70, 0.66, 0.62, 0.60, 0.60)
"""Acceptance rates by depth, given that all earlier drafts were accepted."""

SECOND = 0.8

NOISE, NOISY = 0.05, 0.15
"""Relative standard deviation of the seconds of a simulated step."""

_ENOUGH = 3
"""Recorded steps of a plan from which its median is used instead of the fit."""

_TRUST = 30.0
"""Verifications at one batch size that weigh as much as the whole trace."""

_STILL = 25
"""Steps between two changes of a drifting acceptance rate."""


@dataclass(frozen=True, slots=True)
class Drafted:
    """The outcome of a plan in a step. `drafts` is the mean of verified drafts per request."""

    plan: DraftPlan
    drafts: float
    passes: int
    """Forward passes of the drafter."""
    reach: Sequence[float]
    """Probabilities that at least 1, 2, ... drafts of a request are accepted."""
    straight: Sequence[float] = ()
    """For trees: the same of the chain of first children."""

    @property
    def made(self) -> float:
        """Mean tokens per request."""
        return 1 + sum(self.reach)

    @property
    def draft_rows(self) -> int:
        """`DraftPlan.draft_rows` of the passes that ran."""
        return 1 + (self.passes - 1) * self.plan.topk if self.passes else 0


NOTHING = Drafted(OFF, 0, 0, ())

Seconds = Callable[[int, int, Drafted], float]
"""Seconds by (step, running, outcome), without noise."""

Outcomes = Callable[[int, int, DraftPlan, float], Drafted]
"""Outcome by (step, running, plan, min acceptance probability of a tree's drafts)."""


@dataclass(frozen=True, slots=True)
class Simulator:
    """The number of running requests at each step, and cost and outcome of each of the `plans`."""

    sizes: Sequence[int]
    seconds: Seconds
    drafted: Outcomes
    plans: Sequence[DraftPlan]
    noise: float = NOISE
    """Standard deviation of the logarithm of a measured step's seconds."""
    catch_up: float = 0.0
    """Catch-up cost: seconds per token that was generated while nothing was drafted."""

    def rate(self, step: int, plan: DraftPlan, min_acceptance: float = 0.0) -> float:
        """Tokens per second of one request."""
        running = self.sizes[step]
        drafted = self.drafted(step, running, plan, min_acceptance)
        return drafted.made / self.seconds(step, running, drafted)


def by_rates(
    rates: Callable[[int, int], Sequence[float]],
    second: Callable[[int], float] = lambda step: SECOND,
) -> Outcomes:
    """Outcomes from acceptance rates by depth, a function of (step, running), and from `second`
    (see the module's docstring), a function of the step."""

    def drafted(step: int, running: int, plan: DraftPlan, min_acceptance: float) -> Drafted:
        if plan == OFF:
            return NOTHING
        found = tuple(rates(step, running)[: plan.steps])
        if plan.topk == 1:
            return Drafted(plan, plan.steps, plan.steps, list(accumulate(found, mul)))
        return _tree(found, second(step), plan, min_acceptance)

    return drafted


@lru_cache(maxsize=1 << 14)
def _tree(
    rates: tuple[float, ...], second: float, plan: DraftPlan, min_acceptance: float
) -> Drafted:
    """`rates` has one entry per level. Drafts with a probability below `min_acceptance` are left
    out, and the drafter stops after a level without any draft left."""
    reach, drafts, straight = [0.0] * plan.steps, 0, list[float]()
    line = list(accumulate(rates, mul))
    for chance, depth in _candidates(rates, second, plan.topk)[: plan.verify_tokens - 1]:
        if chance >= min_acceptance:
            # At most one node of a depth is accepted, so probabilities add up.
            reach[depth] += chance
            drafts += 1
            if depth == len(straight) and chance == line[depth]:
                straight.append(chance)
    kept = sum(chance >= min_acceptance for chance in line)
    passes = min(kept + 1, plan.steps)
    return Drafted(plan, drafts, passes, [x for x in reach if x > 0], straight)


@lru_cache(maxsize=1 << 10)
def _candidates(rates: tuple[float, ...], second: float, topk: int) -> list[tuple[float, int]]:
    """Acceptance probabilities of all candidates, in descending order, and their depths from 0."""
    found: list[tuple[float, int]] = []
    followed = [1.0]
    for depth, rate in enumerate(rates):
        next_one = rate * second
        more = [(1 - rate) * next_one * (1 - next_one) ** i for i in range(topk - 1)]
        level = sorted((above * p for above in followed for p in (rate, *more)), reverse=True)
        found += [(chance, depth) for chance in level]
        followed = level[:topk]
    # Among equals, parents come before children.
    return sorted(found, key=lambda node: (-node[0], node[1]))


def _two_cores(step: int, running: int, drafted: Drafted) -> float:
    """Seconds of about a 19M-parameter model on two CPU cores: reading the weights, tokens beyond
    those that reading hides, and the drafter."""
    rows = running * (drafted.drafts + 1)
    drafting = 1e-4 * (1 + drafted.passes) + 4e-5 * drafted.draft_rows * running
    return 2.2e-3 + 2.8e-4 * max(rows - 6, 0) + (drafting if drafted.passes else 0.0)


def _two_cores_small(step: int, running: int, drafted: Drafted) -> float:
    """Seconds of about a 2M-parameter model on two CPU cores: call overhead and tokens."""
    drafting = 2e-4 + 3e-5 * drafted.passes + 8e-6 * running if drafted.passes else 0.0
    return 3.5e-4 + 2.7e-5 * running * (drafted.drafts + 1) + drafting


def _accelerator(step: int, running: int, drafted: Drafted) -> float:
    """Seconds of about an accelerator that computes a hundred tokens while it reads the weights."""
    rows = running * (drafted.drafts + 1)
    drafting = 2e-4 + 1.5e-4 * drafted.passes + 3e-6 * drafted.draft_rows * running
    return 4e-3 + 5e-6 * rows + 3e-5 * max(rows - 96, 0) + (drafting if drafted.passes else 0.0)


def simulated(seed: int) -> dict[str, Simulator]:
    """All synthetic settings of the benchmark, 1,000 to 4,000 steps each (see `regret`)."""
    rng = random.Random(seed)
    shrinking = [size for size in (64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1) for _ in range(40)]
    short = [size for size in (64, 56, 48, 32, 24, 16, 12, 8) for _ in range(22)]
    speeds: list[float] = []
    while len(speeds) < 2000:
        speeds += [math.exp(rng.gauss(0, 0.15))] * rng.randrange(20, 120)
    good = by_rates(lambda step, running: [0.95 - 0.02 * depth for depth in range(8)])
    uneven = by_rates(lambda step, running: [0.92, 0.7, 0.8, 0.65, 0.65, 0.6, 0.6])
    drifting = by_rates(lambda step, running: [0.45 + 0.45 * math.cos(step / 500)] * 8)

    def drifting_speed(step: int, running: int, drafted: Drafted) -> float:
        return _two_cores(step, running, drafted) * speeds[step]

    plans = chains()
    simulators = {
        f"constant, {size}": Simulator([size] * 1000, _two_cores, good, plans)
        for size in (1, 4, 16, 64)
    }
    simulators["shrinking"] = Simulator(shrinking * 4, _two_cores, good, plans)
    simulators["shrinking, noisy"] = Simulator(shrinking * 4, _two_cores, good, plans, NOISY)
    simulators["small model"] = Simulator(
        short * 12, _two_cores_small, uneven, plans, NOISY, 1.6e-6
    )
    simulators["acceptance drift, 2"] = Simulator([2] * 4000, _two_cores, drifting, plans)
    simulators["acceptance drift, 16"] = Simulator([16] * 4000, _two_cores, drifting, plans)
    simulators["speed drift, 2"] = Simulator([2] * 2000, drifting_speed, good, plans)
    simulators["speed drift, 16"] = Simulator([16] * 2000, drifting_speed, good, plans)
    return simulators | _with_trees(shrinking)


def _with_trees(shrinking: list[int]) -> dict[str, Simulator]:
    plans = all_plans()
    fair = by_rates(lambda step, running: FAIR)

    def slowly(step: int) -> float:
        return math.cos(step // _STILL * _STILL / 500)

    turning = by_rates(lambda step, running: [x * (0.6 + 0.4 * slowly(step)) for x in FAIR])
    branching = by_rates(lambda step, running: FAIR, lambda step: 0.4 + 0.4 * slowly(step))
    simulators = {
        f"trees, {size}": Simulator([size] * 1000, _accelerator, fair, plans)
        for size in (1, 4, 16, 64)
    }
    simulators["trees, shrinking"] = Simulator(shrinking * 4, _accelerator, fair, plans)
    simulators["trees, noisy"] = Simulator(shrinking * 4, _accelerator, fair, plans, NOISY)
    simulators["trees, acceptance drift, 2"] = Simulator([2] * 4000, _accelerator, turning, plans)
    simulators["trees, sibling drift, 2"] = Simulator([2] * 4000, _accelerator, branching, plans)
    simulators["expensive tokens, 2"] = Simulator([2] * 1000, _two_cores, fair, plans)
    simulators["expensive tokens, shrinking"] = Simulator(shrinking * 4, _two_cores, fair, plans)
    return simulators


def recorded(lines: Iterable[str]) -> Simulator:
    """A simulator of a recorded trace and the plans in it. Rollouts in backoff are not in a trace.

    A plan's seconds at a batch size are the median of its steps there, or a fit to all steps if it
    had fewer than three. Acceptance rates of chains, and verified and accepted drafts of trees,
    are those of the batch size, shrunk towards the whole trace. Trees keep their recorded sizes: a
    trace cannot tell what a selector with another min acceptance probability would have left out.

    Raises ConfigError for a trace without steps, ValueError for lines that are no trace.
    """
    found = _Recorded()
    for event in read_trace(lines):
        if isinstance(event, StepRecord):
            found.add(event)
    if not found.sizes or not found.costs.known:
        raise ConfigError("a trace without steps; record one with speculative.trace=true")
    return Simulator(found.sizes, found.seconds, found.drafted, sorted(found.tried))


class _Recorded:
    """Statistics of the recorded steps."""

    def __init__(self) -> None:
        self.costs = StepCosts()
        self.sizes: list[int] = []
        self.tried = {OFF}
        self._took: dict[tuple[int, DraftPlan], list[float]] = defaultdict(list)
        self._curves: dict[int, AcceptanceCurve] = defaultdict(
            lambda: AcceptanceCurve(kept=math.inf)
        )
        # Drafts and accepted drafts of each verification of a tree.
        self._trees: dict[tuple[int, DraftPlan], list[tuple[int, int]]] = defaultdict(list)
        # Caches: both are needed in every step.
        self._medians: dict[tuple[int, DraftPlan], float] = {}
        self._known: dict[tuple[int, DraftPlan], Drafted] = {}

    def add(self, step: StepRecord) -> None:
        size, plan = bucket_of(step.running), step.drawn
        self.sizes.append(step.running)
        self.tried.add(plan)
        counts = list(zip(step.drafted, step.accepted, strict=True)) or [(0, 0)] * step.running
        for where in (size, _ANYWHERE):
            if plan.topk > 1:
                self._trees[where, plan] += counts
            elif step.drafted:
                self._curves[where].record(step.drafted, step.accepted)
        if step.steady:
            drafts = fmean(n for n, _ in counts) if plan.topk > 1 else None
            self.costs.record(size, plan, [(step.running, step.seconds)], drafts=drafts)
            self._took[size, plan].append(step.seconds)

    def seconds(self, step: int, running: int, drafted: Drafted) -> float:
        """`Simulator.seconds`."""
        size = bucket_of(running)
        cell = size, drafted.plan
        if cell not in self._medians and len(self._took[cell]) >= _ENOUGH:
            self._medians[cell] = median(self._took[cell])
        if cell in self._medians:
            return self._medians[cell]
        drafts = drafted.drafts if drafted.plan.topk > 1 else None
        return self.costs.seconds(running, drafted.plan, size, drafts)

    def drafted(self, step: int, running: int, plan: DraftPlan, min_acceptance: float) -> Drafted:
        """`Simulator.drafted`."""
        cell = bucket_of(running), plan
        if cell not in self._known:
            self._known[cell] = self._drafted(*cell)
        return self._known[cell]

    def _drafted(self, size: int, plan: DraftPlan) -> Drafted:
        if plan == OFF:
            return NOTHING
        if plan.topk > 1:
            here, all_of_them = (self._trees[where, plan] for where in (size, _ANYWHERE))
            share = len(here) / (len(here) + _TRUST)

            def mean(of: Callable[[tuple[int, int]], float]) -> float:
                own = fmean(map(of, here)) if here else 0.0
                return share * own + (1 - share) * fmean(map(of, all_of_them))

            reach = [
                mean(lambda seen, depth=depth: seen[1] > depth)  # type: ignore[misc]
                for depth in range(plan.steps)
            ]
            return Drafted(plan, mean(lambda seen: seen[0]), plan.steps, reach)
        everywhere = self._curves[_ANYWHERE].rates(plan.steps)
        own = self._curves[size]
        rates = [own.rate(depth, guess, _TRUST) for depth, guess in enumerate(everywhere)]
        return Drafted(plan, plan.steps, plan.steps, list(accumulate(rates, mul)))


_ANYWHERE = 0
"""Stands for the whole trace in place of a batch size."""
