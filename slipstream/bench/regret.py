"""What choosing costs: selectors of draft plans against the best plans in hindsight.

On simulated machines, where every plan's true rate is known, and on recorded traces
(`speculative.trace=true`), where it is estimated from the steps that were recorded:

    still      nothing changes
    shrinking  a rollout's batch: 64 requests, then fewer and fewer
    drifting   drafts become useless and useful again, as a policy moves away from its draft head
    moods      all steps take longer or less long for tens of steps: neighbours on the hardware
    noisy      single steps differ by 15 %
    small      a policy so small that drafts gain little where they gain at all; noisy

Regret is the share of the time that the same tokens would not have taken: by the plan that is best
on average at each batch size (`hindsight`), and by the best one at each single step, which nobody
can know (`clairvoyant`). What the selector's own work takes is no part of that: it is measured
(`choosing`), with caches that nothing else empties, so less than inside an engine.

FastRL's bandits choose among the same plans, plain decoding included; BEG, which leaves them no
choice where each verifies another number of tokens, by the thresholds 1, 2, 4, ... that nobody has
fitted to the machine. All begin knowing nothing; `warm` is their regret, in hindsight, when they go
through the same world once more. Called by `slipstream bench selector`.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

from slipstream.bench.record import Row, Spread, this_machine
from slipstream.bench.speculation import DEPTHS, chains
from slipstream.errors import ConfigError
from slipstream.inference.speculation.acceptance import AcceptanceCurve, expected_accepted
from slipstream.inference.speculation.bandits import (
    BanditSelector,
    EpsilonGreedy,
    UpperConfidenceBound,
    buckets_by_rows,
)
from slipstream.inference.speculation.costs import StepCosts
from slipstream.inference.speculation.plan import OFF, DraftPlan
from slipstream.inference.speculation.report import read_trace
from slipstream.inference.speculation.selector import (
    CostModelSelector,
    StepRecord,
    StrategySelector,
    bucket_of,
)

FLOOR = 0.05
"""The project promises less regret than this against the best fixed plan of each batch size, of the
selector that it uses by default."""

Maker = Callable[[Sequence[DraftPlan], int], StrategySelector]
"""A selector of these plans, with a seed."""


def _by_rows(plans: Sequence[DraftPlan], seed: int) -> BanditSelector:
    thresholds = [2**i for i in range(len({plan.verify_tokens for plan in plans}))]
    return BanditSelector(buckets_by_rows(plans, thresholds), EpsilonGreedy(), seed=seed)


SELECTORS: dict[str, Maker] = {
    "cost model": lambda plans, seed: CostModelSelector(plans),
    "EG": lambda plans, seed: BanditSelector({1: plans}, EpsilonGreedy(), seed=seed),
    "UCB1": lambda plans, seed: BanditSelector({1: plans}, UpperConfidenceBound(), seed=seed),
    "BEG": _by_rows,
}
"""By the values of `speculative.eagle.tune_algorithm`; the first one is the default."""

_NOISE, _NOISY = 0.05, 0.15
"""Relative: of the time of a simulated step."""

_ENOUGH = 3
"""Recorded steps of a plan whose median says what it takes."""


@dataclass(frozen=True, slots=True)
class World:
    """What happens at each step: how many requests run, what a plan takes, which drafts are
    right."""

    sizes: Sequence[int]
    seconds: Callable[[int, int, int], float]
    """Of (step, running, drafts), without noise."""
    rates: Callable[[int, int], Sequence[float]]
    """Of (step, running): how often the draft of each depth is right after right ones."""
    noise: float = _NOISE
    """Standard deviation of the logarithm of a measured step's seconds."""
    taking_in: float = 0.0
    """Seconds that a drafter which has rested needs for each token that was written meanwhile."""

    def rate(self, step: int, drafts: int) -> float:
        """Tokens a second and request."""
        running = self.sizes[step]
        made = 1 + expected_accepted(self.rates(step, running)[:drafts])
        return made / self.seconds(step, running, drafts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Regret:
    """Shares of the time of one run, and how much of it went by with drafts. To that time, what
    `choosing` takes by the clock comes in addition."""

    seconds: float
    hindsight: float
    clairvoyant: float
    drafting: float
    choosing: float


def play(world: World, selector: StrategySelector, plans: Sequence[DraftPlan], seed: int) -> Regret:
    """Let a selector that knows `plans` go through a world. What it is charged for is the expected
    time of its plans, and for taking in what was written while it did not draft: luck only reaches
    it."""
    rng, spent, drafting, missed = random.Random(seed), 0.0, 0.0, 0
    choosing, unseen = 0.0, 0
    hindsight = _best_of_each_size(world, plans)
    best = sharpest = 0.0
    for step, running in enumerate(world.sizes):
        grown = step > 0 and running > world.sizes[step - 1]
        start = perf_counter()
        if grown or not step:
            unseen = selector.begins(running)
        plan = OFF if unseen else selector.select(running)
        choosing += perf_counter() - start
        seconds = world.seconds(step, running, plan.steps)
        # Requests that come anew bring what there is to know of them.
        missed = 0 if grown else missed
        late = missed * running * world.taking_in if plan != OFF else 0.0
        accepted = _drawn(world.rates(step, running), plan.steps, running, rng)
        record = StepRecord(
            running=running,
            plan=plan,
            seconds=(seconds + late) * math.exp(rng.gauss(0, world.noise)),
            drafted=[plan.steps] * running if plan.steps else [],
            accepted=accepted if plan.steps else [],
            steady=plan == OFF or not missed,
        )
        start = perf_counter()
        if unseen:
            unseen -= 1
        else:
            selector.record(record)
        choosing += perf_counter() - start
        tokens = world.rate(step, plan.steps) * seconds
        spent += seconds + late
        drafting += seconds * (plan != OFF)
        best += tokens / world.rate(step, hindsight[bucket_of(running)].steps)
        sharpest += tokens / max(world.rate(step, p.steps) for p in plans)
        missed = missed + 1 if plan == OFF else 0
    return Regret(
        seconds=spent,
        hindsight=1 - best / spent,
        clairvoyant=1 - sharpest / spent,
        drafting=drafting / spent,
        choosing=choosing / spent,
    )


def _best_of_each_size(world: World, plans: Sequence[DraftPlan]) -> dict[int, DraftPlan]:
    """By the time that one token takes, summed over the steps of each size."""
    total: dict[int, dict[DraftPlan, float]] = defaultdict(lambda: dict.fromkeys(plans, 0.0))
    for step, running in enumerate(world.sizes):
        for plan in plans:
            total[bucket_of(running)][plan] += 1 / world.rate(step, plan.steps)
    return {size: min(sums, key=sums.__getitem__) for size, sums in total.items()}


def _drawn(rates: Sequence[float], drafts: int, running: int, rng: random.Random) -> list[int]:
    """How many drafts of each request are accepted."""
    found = []
    for _ in range(running):
        right = 0
        while right < drafts and rng.random() < rates[right]:
            right += 1
        found.append(right)
    return found


def _two_cores(step: int, running: int, drafts: int) -> float:
    """Seconds, about as two cores and a model of 19M parameters: reading the weights, rows beyond
    those that reading hides, and the drafts."""
    rows = running * (drafts + 1)
    drafting = 1e-4 * (1 + drafts) + 4e-5 * drafts * running if drafts else 0.0
    return 2.2e-3 + 2.8e-4 * max(rows - 6, 0) + drafting


def _two_cores_small(step: int, running: int, drafts: int) -> float:
    """Seconds, about as two cores and a model of 2M parameters: calls and rows."""
    drafting = 2e-4 + 3e-5 * drafts + 8e-6 * running if drafts else 0.0
    return 3.5e-4 + 2.7e-5 * running * (drafts + 1) + drafting


def simulated(seed: int) -> dict[str, World]:
    """The worlds of the module's docstring, some thousand steps each."""
    rng = random.Random(seed)
    shrinking = [size for size in (64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1) for _ in range(40)]
    short = [size for size in (64, 56, 48, 32, 24, 16, 12, 8) for _ in range(22)]
    moods: list[float] = []
    while len(moods) < 2000:
        moods += [math.exp(rng.gauss(0, 0.15))] * rng.randrange(20, 120)

    def good(step: int, running: int) -> Sequence[float]:
        return [0.95 - 0.02 * depth for depth in range(max(DEPTHS))]

    def fair(step: int, running: int) -> Sequence[float]:
        return [0.92, 0.7, 0.8, 0.65, 0.65, 0.6, 0.6]

    def drifting(step: int, running: int) -> Sequence[float]:
        return [0.45 + 0.45 * math.cos(step / 500)] * max(DEPTHS)

    def moody(step: int, running: int, drafts: int) -> float:
        return _two_cores(step, running, drafts) * moods[step]

    worlds = {f"still, {size}": World([size] * 1000, _two_cores, good) for size in (1, 4, 16, 64)}
    worlds["shrinking"] = World(shrinking * 4, _two_cores, good)
    worlds["shrinking, noisy"] = World(shrinking * 4, _two_cores, good, _NOISY)
    worlds["small"] = World(short * 12, _two_cores_small, fair, _NOISY, 1.6e-6)
    worlds["drifting, 2"] = World([2] * 4000, _two_cores, drifting)
    worlds["drifting, 16"] = World([16] * 4000, _two_cores, drifting)
    worlds["moods, 2"] = World([2] * 2000, moody, good)
    worlds["moods, 16"] = World([16] * 2000, moody, good)
    return worlds


def recorded(lines: Iterable[str]) -> tuple[World, list[DraftPlan]]:
    """The world that a trace tells of, and the plans that were tried in it. Rollouts that nobody
    was to draft for are not in it.

    A plan's time at a batch size is the median of its steps there or, where it had few, what a fit
    to all steps says; how often drafts are right is taken over the whole trace.

    Raises ConfigError for a trace without steps, ValueError for lines that are none of a trace.
    """
    costs, curve = StepCosts(), AcceptanceCurve(kept=math.inf)
    sizes: list[int] = []
    seen: dict[tuple[int, int], list[float]] = defaultdict(list)
    tried = {OFF}
    for event in read_trace(lines):
        if not isinstance(event, StepRecord):
            continue
        if event.plan.topk > 1:
            raise ConfigError(
                f"a trace with draft trees, such as {event.plan}: only chains are replayed; record "
                "one with speculative.eagle.spec_topk=1"
            )
        depth, size = max(event.drafted, default=0), bucket_of(event.running)
        sizes.append(event.running)
        tried.add(DraftPlan.chain(depth))
        if event.drafted:
            curve.record(event.drafted, event.accepted)
        if event.steady:
            costs.record(size, DraftPlan.chain(depth), [(event.running, event.seconds)])
            seen[size, depth].append(event.seconds)
    if not sizes or not costs.known:
        raise ConfigError("a trace without steps; record one with speculative.trace=true")
    rates = curve.rates(max(plan.steps for plan in tried))

    def seconds(step: int, running: int, drafts: int) -> float:
        found = seen.get((bucket_of(running), drafts), [])
        if len(found) >= _ENOUGH:
            return median(found)
        return costs.seconds(running, DraftPlan.chain(drafts), bucket_of(running))

    world = World(sizes, seconds, lambda step, running: rates)
    return world, sorted(tried)


def run(traces: Sequence[Path], *, seeds: int) -> list[Row]:
    """A row for each world: of the simulated ones or, where traces are given, of those.

    Raises ConfigError for a trace that cannot be read.
    """
    if not traces:
        by_seed = [simulated(seed) for seed in range(seeds)]
        return [
            _row(name, [worlds[name] for worlds in by_seed], chains(), selector)
            for name in by_seed[0]
            for selector in SELECTORS
        ]
    rows = []
    for path in traces:
        try:
            world, tried = recorded(path.read_text(encoding="utf-8").splitlines())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} is no trace of speculation: {error}") from error
        if len(tried) == 1:
            raise ConfigError(f"{path}: nothing was drafted, so there is nothing to choose from")
        rows += [_row(str(path), [world] * seeds, tried, selector) for selector in SELECTORS]
    return rows


def _row(name: str, worlds: Sequence[World], plans: Sequence[DraftPlan], selector: str) -> Row:
    """`worlds`: one for each seed."""
    make = SELECTORS[selector]
    found, again = [], []
    for seed, world in enumerate(worlds):
        made = make(plans, seed)
        found.append(play(world, made, plans, seed))
        again.append(play(world, made, plans, seed + len(worlds)))
    return Row(
        benchmark="selector",
        case=name,
        contender=selector,
        dtype="",
        threads=None,
        seconds=Spread.of([regret.seconds for regret in found]),
        machine=this_machine(),
        values={
            "regret_hindsight": Spread.of([regret.hindsight for regret in found]),
            "regret_warm": Spread.of([regret.hindsight for regret in again]),
            "regret_clairvoyant": Spread.of([regret.clairvoyant for regret in found]),
            "on_fraction": Spread.of([regret.drafting for regret in found]),
            "choosing": Spread.of([regret.choosing for regret in found]),
        },
    )


def table(rows: Sequence[Row]) -> str:
    """Regrets in per cent by world and selector: median and most."""
    regrets = {"hindsight": "regret_hindsight", "warm": "regret_warm"}
    regrets["clairvoyant"] = "regret_clairvoyant"
    heading = "".join(f"{name:>20}" for name in regrets) + f"{'choosing':>12}{'with drafts':>14}"
    lines = [f"  {'world':<24} {'selector':<11}{heading}"]
    for row in rows:
        values = {name: v for name, v in row.values.items() if isinstance(v, Spread)}
        spreads = [values[name] for name in regrets.values()]
        cells = "".join(f"{f'{100 * v.median:.1f} % (to {100 * v.max:.1f})':>20}" for v in spreads)
        choosing, drafting = (100 * values[name].median for name in ("choosing", "on_fraction"))
        world = f"  {row.case:<24} {row.contender:<11}"
        lines.append(f"{world}{cells}{choosing:>10.1f} %{drafting:>12.0f} %")
    return "\n".join(lines)
