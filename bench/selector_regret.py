"""What choosing costs: selectors of draft plans against the best plans in hindsight.

On simulated machines, where every plan's true rate is known, and on recorded traces
(`speculative.trace=true`), where it is estimated from the steps that were recorded:

    still      nothing changes
    shrinking  a rollout's batch: 64 requests, then fewer and fewer
    drifting   drafts become useless and useful again, as a policy moves away from its draft head
    moods      all steps take longer or less long for tens of steps: neighbours on the hardware
    noisy      single steps differ by 15 %
    small      a policy so small that drafts gain little where they gain at all; noisy

and with draft trees among the plans, on a machine where a hundred rows are nearly free:

    trees      still, and shrinking: trees are best for few requests, chains or nothing for many
    drifting   as above
    siblings   only what siblings are worth comes and goes: trees and chains take turns
    dear rows  the machine of the other worlds: trees never pay

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from bench.simulators import World, recorded, simulated
from slipstream.bench.record import ResultRow, Spread, this_machine
from slipstream.errors import ConfigError
from slipstream.inference.speculation.bandits import (
    BanditSelector,
    EpsilonGreedy,
    UpperConfidenceBound,
    buckets_by_rows,
)
from slipstream.inference.speculation.plan import OFF, DraftPlan
from slipstream.inference.speculation.selector import (
    CostModelSelector,
    RowJudge,
    StepRecord,
    StrategySelector,
    bucket_of,
)

FLOOR = 0.03
"""The project promises less regret than this against the best fixed plan of each batch size, of the
selector that it uses by default, once it has gone through a world."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Regret:
    """Shares of the time of one run, and how much of it went by with drafts. To that time, what
    `choosing` takes by the clock comes in addition."""

    seconds: float
    hindsight: float
    clairvoyant: float
    drafting: float
    choosing: float


def play(world: World, selector: StrategySelector, seed: int) -> Regret:
    """Let a selector that knows the world's plans go through it. What it is charged for is the
    expected time of its plans, and for taking in what was written while it did not draft: luck only
    reaches it."""
    rng, spent, drafting, missed = random.Random(seed), 0.0, 0.0, 0
    choosing, unseen = 0.0, 0
    judge = selector if isinstance(selector, RowJudge) else None
    hindsight = _best_of_each_size(world)
    best = sharpest = 0.0
    for step, running in enumerate(world.sizes):
        grown = step > 0 and running > world.sizes[step - 1]
        start = perf_counter()
        if grown or not step:
            unseen = selector.begins(running)
        plan = OFF if unseen else selector.select(running)
        worth = judge.worth(running) if judge is not None else 0.0
        choosing += perf_counter() - start
        drafted = world.drafted(step, running, plan, worth)
        seconds = world.seconds(step, running, drafted)
        # Requests that come anew bring what there is to know of them.
        missed = 0 if grown else missed
        late = missed * running * world.taking_in if plan != OFF else 0.0
        counts = _shared_out(drafted.drafts, running)
        luck = [rng.random() for _ in range(running)]
        straight = zip(
            [len(drafted.straight)] * running, _right(drafted.straight, luck), strict=True
        )
        record = StepRecord(
            running=running,
            plan=plan,
            seconds=(seconds + late) * math.exp(rng.gauss(0, world.noise)),
            drafted=counts,
            accepted=_right(drafted.reach, luck) if counts else [],
            steady=plan == OFF or not missed,
            straight=list(straight) if drafted.straight else [],
        )
        start = perf_counter()
        if unseen:
            unseen -= 1
        else:
            selector.record(record)
        choosing += perf_counter() - start
        tokens = drafted.made
        spent += seconds + late
        drafting += seconds * (plan != OFF)
        best += tokens / world.rate(step, hindsight[bucket_of(running)])
        sharpest += tokens / max(world.rate(step, p) for p in world.plans)
        missed = missed + 1 if not counts else 0
    return Regret(
        seconds=spent,
        hindsight=1 - best / spent,
        clairvoyant=1 - sharpest / spent,
        drafting=drafting / spent,
        choosing=choosing / spent,
    )


def _best_of_each_size(world: World) -> dict[int, DraftPlan]:
    """By the time that one token takes, summed over the steps of each size."""
    total: dict[int, dict[DraftPlan, float]] = defaultdict(lambda: dict.fromkeys(world.plans, 0.0))
    for step, running in enumerate(world.sizes):
        for plan in world.plans:
            total[bucket_of(running)][plan] += 1 / world.rate(step, plan)
    return {size: min(sums, key=sums.__getitem__) for size, sums in total.items()}


def _shared_out(drafts: float, running: int) -> list[int]:
    """Drafts of each request; none where there are none at all."""
    total = round(drafts * running)
    counts = [total * (i + 1) // running - total * i // running for i in range(running)]
    return counts if total else []


def _right(reach: Sequence[float], luck: Sequence[float]) -> list[int]:
    """How many drafts of each request are right, where so many are with these chances."""
    return [sum(lot < chance for chance in reach) for lot in luck]


def run(traces: Sequence[Path], *, seeds: int) -> list[ResultRow]:
    """A row for each world: of the simulated ones or, where traces are given, of those.

    Raises ConfigError for a trace that cannot be read.
    """
    if not traces:
        by_seed = [simulated(seed) for seed in range(seeds)]
        return [
            _row(name, [worlds[name] for worlds in by_seed], selector)
            for name in by_seed[0]
            for selector in SELECTORS
        ]
    rows = []
    for path in traces:
        try:
            world = recorded(path.read_text(encoding="utf-8").splitlines())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} is no trace of speculation: {error}") from error
        if len(world.plans) == 1:
            raise ConfigError(f"{path}: nothing was drafted, so there is nothing to choose from")
        rows += [_row(str(path), [world] * seeds, selector) for selector in SELECTORS]
    return rows


def _row(name: str, worlds: Sequence[World], selector: str) -> ResultRow:
    """`worlds`: one for each seed."""
    make = SELECTORS[selector]
    found, again = [], []
    for seed, world in enumerate(worlds):
        made = make(world.plans, seed)
        found.append(play(world, made, seed))
        again.append(play(world, made, seed + len(worlds)))
    return ResultRow(
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


def missed(rows: Sequence[ResultRow]) -> list[str]:
    """Worlds in which the default selector's regret, warm, is above the floor in most seeds."""
    default = next(iter(SELECTORS))
    warm = {row.case: row.values["regret_warm"] for row in rows if row.contender == default}
    return [
        world for world, found in warm.items() if isinstance(found, Spread) and found.median > FLOOR
    ]


def table(rows: Sequence[ResultRow]) -> str:
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
