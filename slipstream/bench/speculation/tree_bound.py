"""An upper bound for draft trees against chains (`slipstream bench speculation --bound`).

The speed of a tree depends on this engine, which does more work for a tree than for a chain. So the
benchmark also computes the speed of the tree with only the work that no engine can avoid. Levels of
a tree depend on each other like the steps of a chain. So a tree takes at least the time of a chain
with the same number of levels, and the policy's time for the tokens that it verifies in addition to
that chain's. The bound leaves out the cost of wider levels of the head, of attention along paths,
and of choosing and arranging nodes. The tokens per step are measured.

The bound holds for the given trees, verified in full, and for chains as this engine drafts them.
The cost model's selector also leaves out nodes with a low estimated acceptance probability, which
saves verified tokens and loses accepted ones.

Used by `command`. Settings are those of `rollout.SpeculationBench`.
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
"""Suffix of the name of a chain whose drafts cost no time and are all wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """The speed of a plan over steps without drafts, and its relative standard error."""

    plan: DraftPlan
    speed: float
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """One batch size: the fastest chain, the fastest tree, and the tree with the largest upper
    bound (`possible`)."""

    case: str
    chain: Speed
    tree: Speed
    possible: Speed


def run_bound(bench: SpeculationBench, say: Callable[[str], None]) -> list[ResultRow]:
    """Measure; all speeds are over steps without drafts. Per batch size there is one row for each
    plan, for a chain as deep as each tree, and for each number of verified tokens of these (the
    policy's time without drafting). If no chain is among the plans, those of `chains` are added.

    Raises ConfigError if no plan is a tree.
    """
    requested = [plan for plan in bench.grid_plans if plan != OFF]
    trees = [plan for plan in requested if plan.topk > 1]
    if not trees:
        raise ConfigError(
            f"--plan {' '.join(map(str, requested))} has no tree to compare with chains; add one, "
            "such as 6_3_16"
        )
    usual = [] if len(trees) < len(requested) else chains()[1:]
    as_deep = [DraftPlan.chain(tree.steps) for tree in trees]
    rows_of = sorted({plan.verify_tokens for plan in [*trees, *as_deep]})
    bench = replace(bench, plans=tuple(dict.fromkeys([*usual, *requested, *as_deep])))
    undrafted = replace(bench, plans=tuple(DraftPlan.chain(rows - 1) for rows in rows_of))
    trained = load_trained(bench.policy, bench.device, bench.candidates)
    rows: list[ResultRow] = []
    for work in workloads(bench, trained, say):
        head = FixedPlans(bench, trained, work, make_eagle(trained, bench.dtype))
        verified = FixedPlans(undrafted, trained, work, _always_wrong(trained, work, max(rows_of)))
        # Interleaved, so that drift of the machine's speed affects both equally.
        while not (head.known and verified.known):
            head.decode()
            verified.decode()
        rows += [over_off_row(bench, work, plan) for plan in head.found()]
        rows += [
            replace(over_off_row(undrafted, work, plan), contender=plan.name + UNDRAFTED)
            for plan in verified.found()
            if plan.plan != OFF
        ]
        say(bound_table(rows))
    return rows


def _always_wrong(trained: Trained, work: FullBatches, most: int) -> LyingOracle:
    """An oracle of wrong drafts for `work`, with up to `most` drafts after the end of a
    response."""
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
    """Time of a plan's step, in steps without drafts, and tokens per step."""

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
        # More tokens cannot take less time, and fewer cannot take more.
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
    """One line per batch size: the best chain, the best tree, and the tree with the largest upper
    bound; and the speeds of both trees over the chain's, with standard errors."""
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
    """By batch size: the speed of the best tree, and the upper bound for a tree, both over the best
    chain's speed."""
    return {
        bound.case: {
            "tree_over_chain": bound.tree.speed / bound.chain.speed,
            "tree_at_most_over_chain": bound.possible.speed / bound.chain.speed,
        }
        for bound in bounds(rows)
    }
