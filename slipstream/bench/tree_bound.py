"""What draft trees could gain over chains at most on this machine (`slipstream bench speculation
--bound`).

Whether a tree beats the best chain depends on the engine, too, which has more to do for it. So
beside what both do: what a tree would do if it had nothing more to do than what it cannot do
without. Its levels depend on each other as a chain's do, so it takes at least as long as a chain of
as many; and of the rows that it has more than that chain, at least as long as the policy takes for
them when they are drafted for nothing. Wider levels of the head, attention along paths, choosing
and laying out nodes are free. What it yields is measured.

Used by `command`; settings are those of `speculation`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from slipstream.bench.drafters import LyingOracle
from slipstream.bench.grid import OVER_OFF, FullBatches, Turns, fixed_plans, fixed_row, workloads
from slipstream.bench.record import Row, median_of
from slipstream.bench.speculation import SpeculationBench, make_eagle
from slipstream.bench.trained import Trained, load_trained, make_engine
from slipstream.errors import ConfigError
from slipstream.inference.speculation.plan import OFF, DraftPlan

UNDRAFTED = " undrafted"
"""Ends the name of a plan whose drafts are made by nobody, in no time, and all wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Of one batch size: the fastest chain and tree, by speed over steps without drafts, and the
    tree that could be the fastest, by what it would be if all but its rows were free."""

    case: str
    chain: DraftPlan
    chain_speed: float
    tree: DraftPlan
    tree_speed: float
    possible: DraftPlan
    possible_speed: float


def run_bound(bench: SpeculationBench, say: Callable[[str], None]) -> list[Row]:
    """For each batch size a row for each plan, and for each number of rows that a tree or a chain
    as deep has, one of what the policy takes for them; all over steps without drafts.

    Raises ConfigError without a tree among the plans.
    """
    asked = [plan for plan in bench.in_grid if plan != OFF]
    trees = [plan for plan in asked if plan.topk > 1]
    if not trees:
        raise ConfigError(
            f"--plan {' '.join(map(str, asked))}: no tree to compare with chains; name one, such "
            "as 6_3_16"
        )
    as_deep = [DraftPlan.chain(tree.steps) for tree in trees]
    bench = replace(bench, plans=tuple(dict.fromkeys([*asked, *as_deep])))
    sizes = sorted({plan.verify_tokens for plan in [*trees, *as_deep]})
    undrafted = replace(bench, plans=tuple(DraftPlan.chain(rows - 1) for rows in sizes))
    trained = load_trained(bench.policy, bench.device, bench.candidates)
    rows: list[Row] = []
    for work in workloads(bench, trained, say):
        rows += _by_the_head(bench, trained, work)
        rows += _by_nobody(undrafted, trained, work)
        say(bound_table(rows))
    return rows


def _by_the_head(bench: SpeculationBench, trained: Trained, work: FullBatches) -> list[Row]:
    turns, head = Turns(), make_eagle(trained, bench.dtype)
    engine = make_engine(trained, bench.dtype, proposer=head, selector=turns)
    return [
        fixed_row(bench, work.size, work.length, plan, OVER_OFF, plan.over_off)
        for plan in fixed_plans(bench, work.size, engine, turns, work.batches)
    ]


def _by_nobody(bench: SpeculationBench, trained: Trained, work: FullBatches) -> list[Row]:
    known = {
        request.request_id: tokens
        for batch in work.batches
        for request, tokens in zip(batch.requests, batch.tokens, strict=True)
    }
    wrong = LyingOracle(known, vocab_size=trained.decoder.config.vocab_size, lies=1.0)
    turns = Turns()
    engine = make_engine(trained, bench.dtype, proposer=wrong, selector=turns)
    rows = [
        fixed_row(bench, work.size, work.length, plan, OVER_OFF, plan.over_off)
        for plan in fixed_plans(bench, work.size, engine, turns, work.batches)
    ]
    return [
        replace(row, contender=row.contender + UNDRAFTED) for row in rows if row.contender != "off"
    ]


def bounds(rows: Sequence[Row]) -> list[Bound]:
    """By batch size, from the rows of `run_bound`."""
    found = []
    for case in dict.fromkeys(row.case for row in rows):
        values = {row.contender: row.values for row in rows if row.case == case}
        plans = [
            DraftPlan.parse(name) for name in values if name != "off" and UNDRAFTED not in name
        ]
        tokens = {plan: median_of(values[str(plan)]["accept_length"]) for plan in plans}
        speed = {plan: median_of(values[str(plan)][OVER_OFF]) for plan in plans}
        # In steps without drafts, of which each engine has its own beside what it does.
        takes = {
            DraftPlan.parse(name.removesuffix(UNDRAFTED)).verify_tokens: 1
            / median_of(of_plan[OVER_OFF])
            for name, of_plan in values.items()
            if name.endswith(UNDRAFTED)
        }
        possible = {}
        for plan in plans:
            if plan.topk > 1:
                chain = DraftPlan.chain(plan.steps)
                further = max(0.0, takes[plan.verify_tokens] - takes[chain.verify_tokens])
                possible[plan] = tokens[plan] / (tokens[chain] / speed[chain] + further)
        chain = max((p for p in plans if p.topk == 1), key=speed.__getitem__)
        tree = max(possible, key=speed.__getitem__)
        most = max(possible, key=possible.__getitem__)
        found.append(
            Bound(
                case=case,
                chain=chain,
                chain_speed=speed[chain],
                tree=tree,
                tree_speed=speed[tree],
                possible=most,
                possible_speed=possible[most],
            )
        )
    return found


def bound_table(rows: Sequence[Row]) -> str:
    """A line for each batch size: the best chain, the best tree, the tree that could be best."""
    lines = [
        f"  {'over off':<12}{'best chain':>18}{'best tree':>18}{'of chain':>10}"
        f"{'tree at most':>18}{'of chain':>10}"
    ]
    for b in bounds(rows):
        cells = [
            f"{f'{plan} {speed:.2f}':>18}"
            for plan, speed in (
                (b.chain, b.chain_speed),
                (b.tree, b.tree_speed),
                (b.possible, b.possible_speed),
            )
        ]
        lines.append(
            f"  {b.case:<12}{cells[0]}{cells[1]}{b.tree_speed / b.chain_speed:10.2f}"
            f"{cells[2]}{b.possible_speed / b.chain_speed:10.2f}"
        )
    return "\n".join(lines)
