"""What draft trees could gain over chains at most (`slipstream bench speculation --bound`).

How fast a tree is depends on this engine, too, which has more to do for it than for a chain. So
beside what both do: the speed that the tree would have if it had nothing more to do than what it
cannot do without. Its levels depend on each other as a chain's do, so it takes at least as long as
a chain of as many; and for the rows that it has more than that chain, as long as the policy takes
for them. Wider levels of the head, attention along paths, choosing and laying out nodes are free.
What it yields is measured.

That is of the trees that were named, with all of their rows, and of chains as this engine drafts
them. The cost model's selector leaves out what promises too little, which costs rows and yields.

Used by `command`; settings are those of `speculation`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import hypot

from slipstream.bench.record import ResultRow, Spread, median_of
from slipstream.bench.speculation.drafters import LyingOracle
from slipstream.bench.speculation.fixed_plans import FixedPlans, FullBatches, workloads
from slipstream.bench.speculation.grid import OVER_OFF, over_off_row
from slipstream.bench.speculation.rollout import SpeculationBench, chains, make_eagle
from slipstream.bench.speculation.trained import Trained, load_trained
from slipstream.errors import ConfigError
from slipstream.inference.speculation.plan import OFF, DraftPlan

UNDRAFTED = " undrafted"
"""Ends the name of a chain whose drafts are made by nobody, in no time, and all wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Of a plan, over steps without drafts, and its relative standard error."""

    plan: DraftPlan
    speed: float
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Of one batch size: the fastest chain and the fastest tree; and, of all trees as fast as they
    could be at most, the fastest."""

    case: str
    chain: Speed
    tree: Speed
    possible: Speed


def run_bound(bench: SpeculationBench, say: Callable[[str], None]) -> list[ResultRow]:
    """For each batch size a row for each plan, a chain as deep as each tree among them, and one for
    each number of rows that these have, of what the policy takes for them; all over steps without
    drafts. Without chains among the plans, those of `chains` are there.

    Raises ConfigError without a tree among the plans.
    """
    asked = [plan for plan in bench.in_grid if plan != OFF]
    trees = [plan for plan in asked if plan.topk > 1]
    if not trees:
        raise ConfigError(
            f"--plan {' '.join(map(str, asked))}: no tree to compare with chains; name one, such "
            "as 6_3_16"
        )
    usual = [] if len(trees) < len(asked) else chains()[1:]
    as_deep = [DraftPlan.chain(tree.steps) for tree in trees]
    rows_of = sorted({plan.verify_tokens for plan in [*trees, *as_deep]})
    bench = replace(bench, plans=tuple(dict.fromkeys([*usual, *asked, *as_deep])))
    undrafted = replace(bench, plans=tuple(DraftPlan.chain(rows - 1) for rows in rows_of))
    trained = load_trained(bench.policy, bench.device, bench.candidates)
    rows: list[ResultRow] = []
    for work in workloads(bench, trained, say):
        head = FixedPlans(bench, trained, work, make_eagle(trained, bench.dtype))
        nobody = FixedPlans(undrafted, trained, work, _always_wrong(trained, work, max(rows_of)))
        # In turns: the machine is to be in the same mood for both.
        while not (head.known and nobody.known):
            head.decode()
            nobody.decode()
        rows += [over_off_row(bench, work, plan) for plan in head.found()]
        rows += [
            replace(over_off_row(undrafted, work, plan), contender=plan.name + UNDRAFTED)
            for plan in nobody.found()
            if plan.plan != OFF
        ]
        say(bound_table(rows))
    return rows


def _always_wrong(trained: Trained, work: FullBatches, most: int) -> LyingOracle:
    """Drafts for `work`, up to `most` of them beyond its end, too."""
    known = {
        request.request_id: [*tokens, *[0] * most]
        for batch in work.batches
        for request, tokens in zip(batch.requests, batch.tokens, strict=True)
    }
    vocabulary, aux_layers = trained.decoder.config.vocab_size, trained.head.aux_layers
    return LyingOracle(known, vocab_size=vocabulary, lies=1.0, aux_layers=aux_layers)


def bounds(rows: Sequence[ResultRow]) -> list[Bound]:
    """By batch size, from the rows of `run_bound`."""
    cases = dict.fromkeys(row.case for row in rows)
    return [
        _bound(case, {row.contender: row.values for row in rows if row.case == case})
        for case in cases
    ]


@dataclass(frozen=True, slots=True)
class _Steps:
    """What a plan takes, in steps without drafts, and yields."""

    takes: float
    takes_error: float
    tokens: float
    tokens_error: float

    @classmethod
    def of(cls, values: Mapping[str, float | Spread]) -> _Steps:
        tokens = median_of(values["accept_length"])
        takes = tokens / median_of(values[OVER_OFF])
        return cls(
            takes,
            takes * median_of(values["steps_off_error"]),
            tokens,
            median_of(values["accept_length_error"]),
        )


def _bound(case: str, values: Mapping[str, Mapping[str, float | Spread]]) -> Bound:
    drafted, undrafted = dict[DraftPlan, _Steps](), dict[int, _Steps]()
    for name, of_plan in values.items():
        if name.endswith(UNDRAFTED):
            rows = DraftPlan.parse(name.removesuffix(UNDRAFTED)).verify_tokens
            undrafted[rows] = _Steps.of(of_plan)
        elif name != "off":
            drafted[DraftPlan.parse(name)] = _Steps.of(of_plan)
    by_plan = {plan: _speed(plan, did) for plan, did in drafted.items()}
    possible = []
    for plan, did in drafted.items():
        if plan.topk == 1:
            continue
        chain = DraftPlan.chain(plan.steps)
        mine, its = undrafted[plan.verify_tokens], undrafted[chain.verify_tokens]
        further = mine.takes - its.takes
        # More rows do not take less, nor fewer more.
        fewer = plan.verify_tokens < chain.verify_tokens
        further = min(further, 0.0) if fewer else max(further, 0.0)
        error = hypot(drafted[chain].takes_error, mine.takes_error, its.takes_error)
        takes = drafted[chain].takes + further
        possible.append(_speed(plan, replace(did, takes=takes, takes_error=error)))
    return Bound(
        case=case,
        chain=max((s for p, s in by_plan.items() if p.topk == 1), key=_fast),
        tree=max((s for p, s in by_plan.items() if p.topk > 1), key=_fast),
        possible=max(possible, key=_fast),
    )


def _speed(plan: DraftPlan, did: _Steps) -> Speed:
    error = hypot(did.takes_error / did.takes, did.tokens_error / did.tokens)
    return Speed(plan=plan, speed=did.tokens / did.takes, error=error)


def _fast(speed: Speed) -> float:
    return speed.speed


def bound_table(rows: Sequence[ResultRow]) -> str:
    """A line for each batch size: the best chain, the best tree, the tree that could be best; and
    the speeds of both as parts of the chain's, with standard errors."""
    part = f"{'of chain':>14}"
    heading = f"{'best chain':>18}{'best tree':>18}{part}{'tree at most':>18}{part}"
    lines = [f"  {'over off':<12}{heading}"]
    for bound in bounds(rows):
        line = f"  {bound.case:<12}{_cell(bound.chain)}"
        for tree in (bound.tree, bound.possible):
            of_chain = tree.speed / bound.chain.speed
            error = of_chain * hypot(tree.error, bound.chain.error)
            line += f"{_cell(tree)}{f'{of_chain:.2f} ±{error:.2f}':>14}"
        lines.append(line)
    return "\n".join(lines)


def _cell(speed: Speed) -> str:
    return f"{f'{speed.plan} {speed.speed:.2f}':>18}"


def summary(rows: Sequence[ResultRow]) -> dict[str, object]:
    """By batch size, the parts of the best chain's speed that the best tree has and a tree could
    have at most."""
    return {
        bound.case: {
            "tree_over_chain": bound.tree.speed / bound.chain.speed,
            "tree_at_most_over_chain": bound.possible.speed / bound.chain.speed,
        }
        for bound in bounds(rows)
    }
