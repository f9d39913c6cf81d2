"""Simulators for selectors of draft plans."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul

import pytest

from bench.selector_regret import SELECTORS, simulate
from bench.simulators import FAIR, Simulator, by_rates, recorded, simulated
from slipstream.inference.speculation.bandits import BanditSelector, EpsilonGreedy
from slipstream.inference.speculation.plan import OFF, DraftPlan
from slipstream.inference.speculation.report import ReportedSelector, replay
from slipstream.inference.speculation.selector import (
    CostModelSelector,
    PredefinedSelector,
    StrategySelector,
)

ONE, TWO = DraftPlan.chain(1), DraftPlan.chain(2)
TREE, WIDE = DraftPlan(2, 2, 4), DraftPlan(6, 4, 16)


def test_acceptance_of_a_small_tree() -> None:
    drafted = by_rates(lambda _, __: [0.6, 0.5], lambda _: 0.5)
    # Probabilities: .6; its sibling .4 * .3 = .12; the child of .6: .3, whose sibling has .3 * .25
    # = .075; the child of .12: .06, whose sibling has .015.
    found = drafted(0, 1, DraftPlan(2, 2, 5), 0.0)
    assert (found.drafts, found.passes, found.draft_rows) == (4, 2, 3)
    assert found.reach == pytest.approx([0.72, 0.375])
    # The best three.
    assert drafted(0, 1, TREE, 0.0).reach == pytest.approx([0.72, 0.3])
    # Two drafts: the chain of two comes before the sibling of the first.
    assert drafted(0, 1, DraftPlan(2, 2, 3), 0.0).reach == pytest.approx([0.6, 0.3])
    assert drafted(0, 1, TWO, 0.9).reach == pytest.approx([0.6, 0.3])
    assert drafted(0, 1, OFF, 0.0).made == 1


def test_drafts_below_the_min_acceptance_probability_are_left_out() -> None:
    drafted = by_rates(lambda _, __: [0.6, 0.5, 0.5, 0.5], lambda _: 0.5)
    plan = DraftPlan(4, 2, 12)
    cut = drafted(0, 1, plan, 0.2)
    assert cut.drafts == 2
    assert cut.reach == pytest.approx([0.6, 0.3])
    # The pass for the third level finds no draft and is the last one.
    assert cut.passes == 3
    assert drafted(0, 1, plan, 0.7).passes == 1
    assert drafted(0, 1, plan, 0.0).passes == 4


def test_simulated_plans_accept_as_many_tokens_as_measured_ones() -> None:
    # Tokens per verification of the quickstart's head (docs/log/trees.md).
    measured = {
        DraftPlan.chain(3): 3.13,
        DraftPlan.chain(5): 3.66,
        DraftPlan.chain(7): 3.93,
        DraftPlan(4, 2, 8): 3.80,
        DraftPlan(5, 3, 8): 4.01,
        DraftPlan(6, 4, 8): 4.08,
        DraftPlan(6, 4, 12): 4.50,
        DraftPlan(6, 4, 16): 4.71,
    }
    fair = by_rates(lambda _, __: FAIR)
    for plan, tokens in measured.items():
        assert fair(0, 4, plan, 0.0).made == pytest.approx(tokens, rel=0.04)


def best(simulator: Simulator, running: int) -> DraftPlan:
    step = list(simulator.sizes).index(running)
    return max(simulator.plans, key=lambda plan: simulator.rate(step, plan))


def test_trees_are_best_for_few_requests_on_an_accelerator_and_never_on_two_cores() -> None:
    settings = simulated(0)
    assert all(best(settings["trees, shrinking"], n).topk > 1 for n in (1, 2, 4, 8))
    assert all(best(settings["trees, shrinking"], n).topk == 1 for n in (16, 32, 64))
    assert not any(
        best(settings["expensive tokens, shrinking"], n).topk > 1 for n in (1, 2, 4, 16, 64)
    )
    assert best(settings["expensive tokens, shrinking"], 1) != OFF


def test_the_acceptance_of_siblings_drifts() -> None:
    simulator = simulated(0)["trees, sibling drift, 2"]
    tree, chain = DraftPlan(4, 2, 8), DraftPlan.chain(5)
    gains = [simulator.rate(step, tree) / simulator.rate(step, chain) for step in (0, 1570, 3140)]
    assert gains[0] > 1.02 > 0.97 > gains[1]
    assert gains[2] == pytest.approx(gains[0], rel=0.01)


def line(
    plan: DraftPlan,
    seconds: float,
    accepted: int = 0,
    *,
    running: int = 2,
    drafts: int | None = None,
    steady: bool = True,
) -> str:
    each = plan.verify_tokens - 1 if drafts is None else drafts
    drafted = [each] * running if each else []
    event = {
        "running": running,
        "plan": str(plan),
        "seconds": seconds,
        "drafted": drafted,
        "accepted": [accepted] * len(drafted),
        "steady": steady,
    }
    return json.dumps(event)


def test_cost_and_acceptance_of_chains_from_a_trace() -> None:
    lines = [line(OFF, 1.0)] * 60 + [json.dumps({"changed": "policy"})] + [line(ONE, 1.2, 1)] * 60
    found = recorded(lines)
    assert found.plans == [OFF, ONE]
    assert list(found.sizes) == [2] * 120
    off, one, two = (found.drafted(0, 2, plan, 0.0) for plan in (OFF, ONE, TWO))
    assert (found.seconds(0, 2, off), found.seconds(0, 2, one)) == (1.0, 1.2)
    assert one.reach[0] == pytest.approx(1, abs=0.05)
    # Two drafts were never tried: the fit predicts them.
    assert found.seconds(0, 2, two) > 1.2


def test_cost_and_acceptance_of_trees_from_a_trace() -> None:
    # The larger tree ran for four requests only and was cut to six drafts per request.
    lines = [line(OFF, 1.0), line(TREE, 1.5, 1), line(TREE, 1.5, 2), line(TWO, 1.4, 1)] * 40
    lines += [line(OFF, 1.2, running=4), line(WIDE, 2.4, 3, running=4, drafts=6)] * 40
    lines += [line(WIDE, 9.0, 3, running=4, drafts=6, steady=False)]
    found = recorded(lines)
    assert found.plans == sorted([OFF, TWO, TREE, WIDE])
    tree, wide = found.drafted(0, 2, TREE, 0.0), found.drafted(0, 4, WIDE, 0.0)
    assert (tree.drafts, wide.drafts) == (3, 6)
    assert tree.reach == pytest.approx([1.0, 0.5])
    assert wide.reach == pytest.approx([1, 1, 1, 0, 0, 0])
    assert (found.seconds(0, 2, tree), found.seconds(0, 4, wide)) == (1.5, 2.4)
    # At other batch sizes it accepts the same, in the seconds that the fit predicts for the tokens
    # that were verified.
    here = found.drafted(0, 2, WIDE, 0.0)
    assert here.reach == pytest.approx(wide.reach)
    assert 1.5 < found.seconds(0, 2, here) < 2.4


def test_each_batch_size_of_a_trace_has_its_own_acceptance() -> None:
    lines = [line(TREE, 1.5, 2, running=1)] * 200 + [line(TREE, 1.5, 0, running=8)] * 25
    found = recorded([line(OFF, 1.0), *lines])
    assert found.drafted(0, 1, TREE, 0.0).made > 2.8
    assert found.drafted(0, 8, TREE, 0.0).made < 1.3
    # Other batch sizes use all 400 verifications of the trace.
    assert found.drafted(0, 3, TREE, 0.0).made == pytest.approx(2.0)


def test_a_step_whose_tree_was_cut_to_its_root_counts_for_the_tree() -> None:
    lines = [line(OFF, 1.0), line(TREE, 1.5, 1), line(TREE, 1.3, drafts=0)] * 30
    found = recorded(lines)
    assert found.drafted(0, 2, TREE, 0.0).drafts == pytest.approx(1.5)
    assert found.seconds(0, 2, found.drafted(0, 2, OFF, 0.0)) == 1.0


def test_chains_are_accepted_with_the_products_of_their_rates() -> None:
    rates = [0.9, 0.8, 0.5]
    chain = by_rates(lambda _, __: rates)(0, 3, DraftPlan.chain(3), 0.0)
    assert chain.reach == pytest.approx(list(accumulate(rates, mul)))


def test_a_recorded_simulator_resembles_the_original() -> None:
    simulator = simulated(0)["trees, 4"]
    plans = [OFF, DraftPlan.chain(5), DraftPlan(4, 2, 8), DraftPlan(6, 4, 24)]
    part = Simulator([4] * 900, simulator.seconds, simulator.drafted, plans)
    lines: list[str] = []
    makers: list[Callable[[Sequence[DraftPlan]], StrategySelector]] = [CostModelSelector, _uniform]
    for seed, maker in enumerate(makers):
        reported = ReportedSelector(maker(plans), notify=lines.append, trace=lines.append)
        simulate(part, reported, seed)
    again = recorded(text for text in lines if text.startswith("{"))
    assert again.plans == sorted(plans)
    for plan in plans:
        true, seen = (w.drafted(0, 4, plan, 0.0) for w in (part, again))
        assert seen.made == pytest.approx(true.made, rel=0.06)
        assert again.seconds(0, 4, seen) == pytest.approx(part.seconds(0, 4, true), rel=0.06)
    assert best(again, 4) == best(part, 4) == DraftPlan(6, 4, 24)
    # Every selector loses time in it, because it starts without knowledge.
    for name, make in SELECTORS.items():
        found = simulate(again, make(again.plans, 0), 0)
        assert 0 < found.hindsight < (0.1 if name == "cost model" else 0.6)
    assert simulate(again, PredefinedSelector(DraftPlan(6, 4, 24)), 0).hindsight == pytest.approx(0)


def _uniform(plans: Sequence[DraftPlan]) -> BanditSelector:
    """Tries all plans equally often."""
    return BanditSelector({1: plans}, EpsilonGreedy(1.0))


def test_a_trace_with_trees_is_replayed_to_the_same_plans() -> None:
    simulator = simulated(0)["trees, shrinking"]
    for make in SELECTORS.values():
        lines: list[str] = []
        reported = ReportedSelector(make(simulator.plans, 3), notify=print, trace=lines.append)
        simulate(
            Simulator(simulator.sizes[:600], simulator.seconds, simulator.drafted, simulator.plans),
            reported,
            0,
        )
        pairs = replay(lines, lambda make=make: make(simulator.plans, 3))  # type: ignore[misc]
        assert len(pairs) > 500
        assert all(chosen == taken for chosen, taken in pairs)
        assert any(plan.topk > 1 for _, plan in pairs)
