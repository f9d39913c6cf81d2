"""Time lost by selectors of draft plans against the best plans in hindsight ("regret").

Synthetic settings, where every plan's true rate is known, or recorded traces
(`speculative.trace=true`), where it is estimated from the recorded steps:

    constant           nothing changes
    shrinking          a rollout's batch: 64 requests, then fewer and fewer
    acceptance drift   drafts become useless and useful again, as a policy drifts from its head
    speed drift        all steps are slower or faster for tens of steps, as on shared machines
    noisy              the seconds of single steps vary by 15 % instead of 5 %
    small model        drafts gain little, or nothing at some batch sizes; noisy

The settings named `trees` have draft trees among the plans, on a machine that verifies a hundred
tokens per forward pass almost for free:

    trees              constant and shrinking: trees are best for few requests, chains or nothing
                       for many
    acceptance drift   as above
    sibling drift      only the acceptance rate of siblings changes, so trees and chains alternate
    expensive tokens   the two-core machine of the other settings: trees never pay

Regret is the share of the time that the same tokens would not have needed with the best plan on
average at each batch size (`hindsight`), or with the best plan at each single step, which nobody
can know (`clairvoyant`). It excludes the selector's own work, which is measured (`choosing`) with
warm CPU caches, so it is smaller than in an engine.

FastRL's bandits choose among the same plans and plain decoding. BEG has no choice if every plan
verifies another number of tokens; its thresholds 1, 2, 4, ... are not tuned to the machine. All
selectors start without knowledge. `warm` is their hindsight regret in a second pass through the
same setting. Called by `slipstream bench selector`.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from bench.simulators import Simulator, recorded, simulated
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
    HasMinAcceptance,
    StepRecord,
    StrategySelector,
    bucket_of,
)

FLOOR = 0.03
"""Most warm regret that the project promises for the default selector, against the best fixed plan
of each batch size."""

Maker = Callable[[Sequence[DraftPlan], int], StrategySelector]
"""Makes a selector of these plans, with a seed."""


def _by_rows(plans: Sequence[DraftPlan], seed: int) -> BanditSelector:
    thresholds = [2**i for i in range(len({plan.verify_tokens for plan in plans}))]
    return BanditSelector(buckets_by_rows(plans, thresholds), EpsilonGreedy(), seed=seed)


SELECTORS: dict[str, Maker] = {
    "cost model": lambda plans, seed: CostModelSelector(plans),
    "EG": lambda plans, seed: BanditSelector({1: plans}, EpsilonGreedy(), seed=seed),
    "UCB1": lambda plans, seed: BanditSelector({1: plans}, UpperConfidenceBound(), seed=seed),
    "BEG": _by_rows,
}
"""Selectors by name, as in `speculative.eagle.tune_algorithm`. The first one is the default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Regret:
    """Regrets and the share of steps' seconds with drafts, of one run. `choosing` is the measured
    time of the selector's own work over `seconds`, which does not include it."""

    seconds: float
    hindsight: float
    clairvoyant: float
    drafting: float
    choosing: float


def simulate(simulator: Simulator, selector: StrategySelector, seed: int) -> Regret:
    """Run a selector through a simulator. Regret counts the expected seconds of its plans and the
    drafter's catch-up cost; noise and luck only reach the selector."""
    rng, spent, drafting, missed = random.Random(seed), 0.0, 0.0, 0
    choosing, unseen = 0.0, 0
    judge = selector if isinstance(selector, HasMinAcceptance) else None
    hindsight = _best_of_each_size(simulator)
    best = sharpest = 0.0
    for step, running in enumerate(simulator.sizes):
        grown = step > 0 and running > simulator.sizes[step - 1]
        start = perf_counter()
        if grown or not step:
            unseen = selector.begin_rollout(running)
        plan = OFF if unseen else selector.select(running)
        least = judge.min_acceptance(running) if judge is not None else 0.0
        choosing += perf_counter() - start
        drafted = simulator.drafted(step, running, plan, least)
        seconds = simulator.seconds(step, running, drafted)
        # New requests arrive with all of their features.
        missed = 0 if grown else missed
        late = missed * running * simulator.catch_up if plan != OFF else 0.0
        counts = _shared_out(drafted.drafts, running)
        luck = [rng.random() for _ in range(running)]
        straight = zip(
            [len(drafted.straight)] * running, _accepted(drafted.straight, luck), strict=True
        )
        record = StepRecord(
            running=running,
            plan=plan,
            seconds=(seconds + late) * math.exp(rng.gauss(0, simulator.noise)),
            drafted=counts,
            accepted=_accepted(drafted.reach, luck) if counts else [],
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
        best += tokens / simulator.rate(step, hindsight[bucket_of(running)])
        sharpest += tokens / max(simulator.rate(step, p) for p in simulator.plans)
        missed = missed + 1 if not counts else 0
    return Regret(
        seconds=spent,
        hindsight=1 - best / spent,
        clairvoyant=1 - sharpest / spent,
        drafting=drafting / spent,
        choosing=choosing / spent,
    )


def _best_of_each_size(simulator: Simulator) -> dict[int, DraftPlan]:
    """The plan with the least seconds per token, summed over the steps of each batch size."""
    total: dict[int, dict[DraftPlan, float]] = defaultdict(
        lambda: dict.fromkeys(simulator.plans, 0.0)
    )
    for step, running in enumerate(simulator.sizes):
        for plan in simulator.plans:
            total[bucket_of(running)][plan] += 1 / simulator.rate(step, plan)
    return {size: min(sums, key=sums.__getitem__) for size, sums in total.items()}


def _shared_out(drafts: float, running: int) -> list[int]:
    """Draft tokens of each request, adding up to the rounded total; empty if it is 0."""
    total = round(drafts * running)
    counts = [total * (i + 1) // running - total * i // running for i in range(running)]
    return counts if total else []


def _accepted(reach: Sequence[float], luck: Sequence[float]) -> list[int]:
    """Accepted drafts of each request, from probabilities `reach` and its random number."""
    return [sum(number < probability for probability in reach) for number in luck]


def run(traces: Sequence[Path], *, seeds: int) -> list[ResultRow]:
    """A row for each setting and selector: of the traces, or of the synthetic settings if no trace
    is given.

    Raises ConfigError for a trace that cannot be read.
    """
    if not traces:
        by_seed = [simulated(seed) for seed in range(seeds)]
        return [
            _row(name, [simulators[name] for simulators in by_seed], selector)
            for name in by_seed[0]
            for selector in SELECTORS
        ]
    rows = []
    for path in traces:
        try:
            simulator = recorded(path.read_text(encoding="utf-8").splitlines())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} is no trace of speculation: {error}") from error
        if len(simulator.plans) == 1:
            raise ConfigError(f"{path}: nothing was drafted, so there is nothing to choose from")
        rows += [_row(str(path), [simulator] * seeds, selector) for selector in SELECTORS]
    return rows


def _row(name: str, simulators: Sequence[Simulator], selector: str) -> ResultRow:
    """`simulators`: one for each seed."""
    make = SELECTORS[selector]
    found, again = [], []
    for seed, simulator in enumerate(simulators):
        made = make(simulator.plans, seed)
        found.append(simulate(simulator, made, seed))
        again.append(simulate(simulator, made, seed + len(simulators)))
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
    """Settings in which the default selector's median warm regret is above the floor."""
    default = next(iter(SELECTORS))
    warm = {row.case: row.values["regret_warm"] for row in rows if row.contender == default}
    return [
        simulator
        for simulator, found in warm.items()
        if isinstance(found, Spread) and found.median > FLOOR
    ]


def table(rows: Sequence[ResultRow]) -> str:
    """Regrets in per cent by setting and selector: median and maximum."""
    regrets = {"hindsight": "regret_hindsight", "warm": "regret_warm"}
    regrets["clairvoyant"] = "regret_clairvoyant"
    heading = "".join(f"{name:>20}" for name in regrets) + f"{'choosing':>12}{'with drafts':>14}"
    lines = [f"  {'setting':<27} {'selector':<11}{heading}"]
    for row in rows:
        values = {name: v for name, v in row.values.items() if isinstance(v, Spread)}
        spreads = [values[name] for name in regrets.values()]
        cells = "".join(f"{f'{100 * v.median:.1f} % (to {100 * v.max:.1f})':>20}" for v in spreads)
        choosing, drafting = (100 * values[name].median for name in ("choosing", "on_fraction"))
        simulator = f"  {row.case:<27} {row.contender:<11}"
        lines.append(f"{simulator}{cells}{choosing:>10.1f} %{drafting:>12.0f} %")
    return "\n".join(lines)
