"""Worlds for selectors of draft plans: simulated ones, where it is known what every plan yields and
takes, and those that recorded traces tell of.

What a simulated tree yields follows from its nodes. After each token the first candidate is right
as often as the draft of a chain, and each further one for `second` times that share of what those
before it leave over. The tree is the one that EAGLE-2 makes of these chances: `topk` nodes of a
level are followed, and of all candidates the best are verified. `FAIR` and `SECOND` are fitted to
what the quickstart's head yielded with eight plans, and meet each within 4 % (docs/log.md).

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
from slipstream.bench.speculation.rollout import plans as trees_too
from slipstream.errors import ConfigError
from slipstream.inference.speculation.acceptance import AcceptanceCurve
from slipstream.inference.speculation.costs import StepCosts
from slipstream.inference.speculation.plan import OFF, DraftPlan
from slipstream.inference.speculation.report import read_trace
from slipstream.inference.speculation.selector import StepRecord, bucket_of

FAIR = (0.87, 0.83, 0.76, 0.70, 0.66, 0.62, 0.60, 0.60)
"""How often the draft of each depth is right after right ones."""

SECOND = 0.8

NOISE, NOISY = 0.05, 0.15
"""Relative: of the time of a simulated step."""

_ENOUGH = 3
"""Recorded steps of a plan whose median says what it takes."""

_TRUST = 30.0
"""Verifications at one batch size that count as much as what the whole trace says of yields."""

_STILL = 25
"""Steps between two changes of a drift."""


@dataclass(frozen=True, slots=True)
class Drafted:
    """What a plan comes to in a step: `drafts` are verified of each request, on average."""

    plan: DraftPlan
    drafts: float
    levels: int
    """Passes of the drafter."""
    reach: Sequence[float]
    """The chances that as many drafts of a request as 1, 2, ... are accepted."""
    straight: Sequence[float] = ()
    """Of trees, the same of the drafts that are each the first after the one before."""

    @property
    def made(self) -> float:
        """Tokens of a request."""
        return 1 + sum(self.reach)

    @property
    def draft_rows(self) -> int:
        """See `DraftPlan.draft_rows`; of so many levels."""
        return 1 + (self.levels - 1) * self.plan.topk if self.levels else 0


NOTHING = Drafted(OFF, 0, 0, ())

Seconds = Callable[[int, int, Drafted], float]
"""Of (step, running, what a plan comes to), without noise."""

Yields = Callable[[int, int, DraftPlan, float], Drafted]
"""Of (step, running, plan, the chance that a draft of a tree must have to be verified)."""


@dataclass(frozen=True, slots=True)
class World:
    """What happens at each step: how many requests run, and what each of the `plans` yields and
    takes."""

    sizes: Sequence[int]
    seconds: Seconds
    drafted: Yields
    plans: Sequence[DraftPlan]
    noise: float = NOISE
    """Standard deviation of the logarithm of a measured step's seconds."""
    taking_in: float = 0.0
    """Seconds that a drafter which has rested needs for each token that was written meanwhile."""

    def rate(self, step: int, plan: DraftPlan, worth: float = 0.0) -> float:
        """Tokens a second and request."""
        running = self.sizes[step]
        drafted = self.drafted(step, running, plan, worth)
        return drafted.made / self.seconds(step, running, drafted)


def by_chances(
    rates: Callable[[int, int], Sequence[float]],
    second: Callable[[int], float] = lambda step: SECOND,
) -> Yields:
    """Of drafts that are right so often after right ones, by (step, running) and depth, and the
    share `second` of the module's docstring, by step."""

    def drafted(step: int, running: int, plan: DraftPlan, worth: float) -> Drafted:
        if plan == OFF:
            return NOTHING
        found = tuple(rates(step, running)[: plan.steps])
        if plan.topk == 1:
            return Drafted(plan, plan.steps, plan.steps, list(accumulate(found, mul)))
        return _tree(found, second(step), plan, worth)

    return drafted


@lru_cache(maxsize=1 << 14)
def _tree(rates: tuple[float, ...], second: float, plan: DraftPlan, worth: float) -> Drafted:
    """`rates` as many as it has steps. Drafts whose chance is below `worth` are left out, and the
    drafter stops after a level none of which is left."""
    reach, drafts, straight = [0.0] * plan.steps, 0, list[float]()
    line = list(accumulate(rates, mul))
    for chance, depth in _candidates(rates, second, plan.topk)[: plan.verify_tokens - 1]:
        if chance >= worth:
            # Of the nodes of one depth no two are right.
            reach[depth] += chance
            drafts += 1
            if depth == len(straight) and chance == line[depth]:
                straight.append(chance)
    worthy = sum(chance >= worth for chance in line)
    levels = min(worthy + 1, plan.steps)
    return Drafted(plan, drafts, levels, [x for x in reach if x > 0], straight)


@lru_cache(maxsize=1 << 10)
def _candidates(rates: tuple[float, ...], second: float, topk: int) -> list[tuple[float, int]]:
    """Chances that all tokens down to a candidate are right, the best first, and depths from 0."""
    found: list[tuple[float, int]] = []
    followed = [1.0]
    for depth, rate in enumerate(rates):
        next_one = rate * second
        more = [(1 - rate) * next_one * (1 - next_one) ** i for i in range(topk - 1)]
        level = sorted((above * p for above in followed for p in (rate, *more)), reverse=True)
        found += [(chance, depth) for chance in level]
        followed = level[:topk]
    # Among equals what is followed comes before what follows.
    return sorted(found, key=lambda node: (-node[0], node[1]))


def _two_cores(step: int, running: int, drafted: Drafted) -> float:
    """Seconds, about as two cores and a model of 19M parameters: reading the weights, rows beyond
    those that reading hides, and the drafts."""
    rows = running * (drafted.drafts + 1)
    drafting = 1e-4 * (1 + drafted.levels) + 4e-5 * drafted.draft_rows * running
    return 2.2e-3 + 2.8e-4 * max(rows - 6, 0) + (drafting if drafted.levels else 0.0)


def _two_cores_small(step: int, running: int, drafted: Drafted) -> float:
    """Seconds, about as two cores and a model of 2M parameters: calls and rows."""
    drafting = 2e-4 + 3e-5 * drafted.levels + 8e-6 * running if drafted.levels else 0.0
    return 3.5e-4 + 2.7e-5 * running * (drafted.drafts + 1) + drafting


def _accelerator(step: int, running: int, drafted: Drafted) -> float:
    """Seconds, about as a machine that computes a hundred rows while it reads the weights."""
    rows = running * (drafted.drafts + 1)
    drafting = 2e-4 + 1.5e-4 * drafted.levels + 3e-6 * drafted.draft_rows * running
    return 4e-3 + 5e-6 * rows + 3e-5 * max(rows - 96, 0) + (drafting if drafted.levels else 0.0)


def simulated(seed: int) -> dict[str, World]:
    """The worlds of `regret`'s docstring, some thousand steps each."""
    rng = random.Random(seed)
    shrinking = [size for size in (64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1) for _ in range(40)]
    short = [size for size in (64, 56, 48, 32, 24, 16, 12, 8) for _ in range(22)]
    moods: list[float] = []
    while len(moods) < 2000:
        moods += [math.exp(rng.gauss(0, 0.15))] * rng.randrange(20, 120)
    good = by_chances(lambda step, running: [0.95 - 0.02 * depth for depth in range(8)])
    uneven = by_chances(lambda step, running: [0.92, 0.7, 0.8, 0.65, 0.65, 0.6, 0.6])
    drifting = by_chances(lambda step, running: [0.45 + 0.45 * math.cos(step / 500)] * 8)

    def moody(step: int, running: int, drafted: Drafted) -> float:
        return _two_cores(step, running, drafted) * moods[step]

    plans = chains()
    worlds = {
        f"still, {size}": World([size] * 1000, _two_cores, good, plans) for size in (1, 4, 16, 64)
    }
    worlds["shrinking"] = World(shrinking * 4, _two_cores, good, plans)
    worlds["shrinking, noisy"] = World(shrinking * 4, _two_cores, good, plans, NOISY)
    worlds["small"] = World(short * 12, _two_cores_small, uneven, plans, NOISY, 1.6e-6)
    worlds["drifting, 2"] = World([2] * 4000, _two_cores, drifting, plans)
    worlds["drifting, 16"] = World([16] * 4000, _two_cores, drifting, plans)
    worlds["moods, 2"] = World([2] * 2000, moody, good, plans)
    worlds["moods, 16"] = World([16] * 2000, moody, good, plans)
    return worlds | _with_trees(shrinking)


def _with_trees(shrinking: list[int]) -> dict[str, World]:
    plans = trees_too()
    fair = by_chances(lambda step, running: FAIR)

    def slowly(step: int) -> float:
        return math.cos(step // _STILL * _STILL / 500)

    turning = by_chances(lambda step, running: [x * (0.6 + 0.4 * slowly(step)) for x in FAIR])
    branching = by_chances(lambda step, running: FAIR, lambda step: 0.4 + 0.4 * slowly(step))
    worlds = {
        f"trees, {size}": World([size] * 1000, _accelerator, fair, plans) for size in (1, 4, 16, 64)
    }
    worlds["trees, shrinking"] = World(shrinking * 4, _accelerator, fair, plans)
    worlds["trees, noisy"] = World(shrinking * 4, _accelerator, fair, plans, NOISY)
    worlds["trees, drifting, 2"] = World([2] * 4000, _accelerator, turning, plans)
    worlds["trees, siblings, 2"] = World([2] * 4000, _accelerator, branching, plans)
    worlds["dear rows, 2"] = World([2] * 1000, _two_cores, fair, plans)
    worlds["dear rows, shrinking"] = World(shrinking * 4, _two_cores, fair, plans)
    return worlds


def recorded(lines: Iterable[str]) -> World:
    """The world that a trace tells of, with the plans that were tried in it. Rollouts that nobody
    was to draft for are not in it.

    A plan's time at a batch size is the median of its steps there or, where it had few, what a fit
    to all steps says. How often drafts of chains are right at each depth, how many drafts trees
    verify and how many are accepted is what was seen at a batch size and, as far as little was, in
    the whole trace. Trees are as large as they were: of what whoever replays it would have left
    out, a trace says nothing.

    Raises ConfigError for a trace without steps, ValueError for lines that are none of a trace.
    """
    found = _Recorded()
    for event in read_trace(lines):
        if isinstance(event, StepRecord):
            found.add(event)
    if not found.sizes or not found.costs.known:
        raise ConfigError("a trace without steps; record one with speculative.trace=true")
    return World(found.sizes, found.seconds, found.drafted, sorted(found.tried))


class _Recorded:
    """What steps have told."""

    def __init__(self) -> None:
        self.costs = StepCosts()
        self.sizes: list[int] = []
        self.tried = {OFF}
        self._took: dict[tuple[int, DraftPlan], list[float]] = defaultdict(list)
        self._curves: dict[int, AcceptanceCurve] = defaultdict(
            lambda: AcceptanceCurve(kept=math.inf)
        )
        # Of trees, each verification: drafts, and how many were accepted.
        self._trees: dict[tuple[int, DraftPlan], list[tuple[int, int]]] = defaultdict(list)
        # Asked for in every step.
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
        """`World.seconds`."""
        size = bucket_of(running)
        cell = size, drafted.plan
        if cell not in self._medians and len(self._took[cell]) >= _ENOUGH:
            self._medians[cell] = median(self._took[cell])
        if cell in self._medians:
            return self._medians[cell]
        drafts = drafted.drafts if drafted.plan.topk > 1 else None
        return self.costs.seconds(running, drafted.plan, size, drafts)

    def drafted(self, step: int, running: int, plan: DraftPlan, worth: float) -> Drafted:
        """`World.drafted`."""
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
        rates = [own.share(depth, guess, _TRUST) for depth, guess in enumerate(everywhere)]
        return Drafted(plan, plan.steps, plan.steps, list(accumulate(rates, mul)))


_ANYWHERE = 0
"""In place of a batch size: the whole trace."""
