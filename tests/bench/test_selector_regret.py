"""Regret of selectors with known choices, and of the default selector."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from statistics import fmean, median

import pytest

from bench import selector_regret as regret
from bench.selector_regret import FLOOR, missed, run, simulate, table
from bench.simulators import Simulator, by_rates, simulated
from slipstream.bench.record import ResultRow, Spread, this_machine
from slipstream.errors import ConfigError
from slipstream.inference.speculation.plan import OFF, DraftPlan
from slipstream.inference.speculation.selector import CostModelSelector, PredefinedSelector
from tests.bench.test_simulators import line

ONE, TWO = DraftPlan.chain(1), DraftPlan.chain(2)


def make_simulator(steps: int = 100) -> Simulator:
    """The first draft is free and always accepted; the second costs a step and is rejected."""
    return Simulator(
        [3] * steps,
        lambda _, __, drafted: 1.0 + (drafted.drafts > 1),
        by_rates(lambda _, __: [1.0, 0.0]),
        [OFF, ONE, TWO],
    )


def test_regret_of_fixed_plans() -> None:
    best = simulate(make_simulator(), PredefinedSelector(ONE), 0)
    assert (best.seconds, best.hindsight, best.drafting) == (100, 0, 1)
    # Plain decoding and two drafts need twice the time for the same tokens.
    for plan, seconds in ((OFF, 100), (TWO, 200)):
        regret = simulate(make_simulator(), PredefinedSelector(plan), 0)
        assert regret.seconds == pytest.approx(seconds)
        assert regret.hindsight == regret.clairvoyant == pytest.approx(0.5)


def test_only_clairvoyant_regret_changes_plans_within_a_batch_size() -> None:
    turning = Simulator(
        [1] * 100,
        lambda _, __, drafted: 1.0 + 0.5 * drafted.drafts,
        by_rates(lambda step, _: [float(step >= 50)]),
        [OFF, ONE],
    )
    regret = simulate(turning, PredefinedSelector(OFF), 0)
    # Over all steps a draft gains what it costs: 1.5 and 0.75 seconds per token.
    assert regret.hindsight == pytest.approx(0)
    assert regret.clairvoyant == pytest.approx(0.125)


def test_the_cost_model_stays_near_the_best_plans() -> None:
    settings = simulated(0)
    assert {"shrinking", "acceptance drift, 2", "speed drift, 16"} < settings.keys()
    for name in ("constant, 1", "constant, 16", "acceptance drift, 2"):
        assert simulate(settings[name], CostModelSelector(settings[name].plans), 0).hindsight < 0.05
    # Plain decoding loses much at one request and nothing at sixteen.
    never = PredefinedSelector(OFF)
    assert simulate(settings["constant, 1"], never, 0).hindsight > 0.5
    assert simulate(settings["constant, 16"], never, 0).hindsight == 0


def test_the_cost_model_stays_near_the_best_plans_with_trees() -> None:
    settings = simulated(0)
    for name in ("trees, 4", "trees, 64", "expensive tokens, 2"):
        simulator, regrets = settings[name], list[float]()
        for seed in range(3):
            selector = CostModelSelector(simulator.plans)
            cold, warm = (
                simulate(simulator, selector, seed + 3 * turn).hindsight for turn in (0, 1)
            )
            assert cold < 0.1
            regrets.append(warm)
        assert median(regrets) < 0.03
    # Always taking the largest tree, or never a tree, is far from the best.
    for plan in (DraftPlan(8, 4, 32), DraftPlan.chain(5)):
        assert simulate(settings["trees, 4"], PredefinedSelector(plan), 0).hindsight > 0.1
    assert (
        simulate(
            settings["expensive tokens, 2"], PredefinedSelector(DraftPlan(4, 2, 8)), 0
        ).hindsight
        > 0.3
    )


def test_many_similar_plans_are_distinguished_in_noise() -> None:
    simulator, regrets = simulated(0)["trees, noisy"], list[float]()
    for seed in range(6):
        selector = CostModelSelector(simulator.plans)
        simulate(simulator, selector, seed)
        regrets.append(simulate(simulator, selector, seed + 9).hindsight)
    assert fmean(regrets) < FLOOR


def test_trees_cost_only_the_drafts_that_are_left() -> None:
    class Cutting(PredefinedSelector):
        def min_acceptance(self, running: int) -> float:
            return 0.2

    tree = DraftPlan(2, 2, 5)
    simulator = Simulator(
        [2] * 50,
        lambda _, __, drafted: 1.0 + drafted.drafts,
        by_rates(lambda _, __: [0.6, 0.5], lambda _: 0.5),
        [OFF, tree],
    )
    # Of the probabilities .6, .3, .12 and .075, two are at least .2.
    assert simulate(simulator, Cutting(tree), 0).seconds == pytest.approx(50 * 3)
    assert simulate(simulator, PredefinedSelector(tree), 0).seconds == pytest.approx(50 * 5)


def test_the_cost_model_stays_near_the_best_plans_in_noise() -> None:
    for name in ("shrinking, noisy", "small model"):
        simulator = simulated(0)[name]
        found = [simulate(simulator, CostModelSelector(simulator.plans), seed) for seed in range(5)]
        assert median(regret.hindsight for regret in found) < 0.05


def test_invalid_traces_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "speculation.jsonl"
    with pytest.raises(ConfigError, match="no trace of speculation"):
        run([path], seeds=1)
    path.write_text("[]\n{")
    with pytest.raises(ConfigError, match="no trace of speculation"):
        run([path], seeds=1)
    path.write_text("")
    with pytest.raises(ConfigError, match=r"speculative\.trace=true"):
        run([path], seeds=1)
    path.write_text(line(OFF, 1.0))
    with pytest.raises(ConfigError, match="nothing was drafted"):
        run([path], seeds=1)
    path.write_text("\n".join([line(OFF, 1.0)] * 30 + [line(ONE, 1.2, 1)] * 30))
    rows = run([path], seeds=2)
    assert {row.case for row in rows} == {str(path)}
    assert [row.contender for row in rows] == ["cost model", "EG", "UCB1", "BEG"]
    lines = table(rows).splitlines()[1:]
    assert [line.split()[:2] for line in lines[1:3]] == [[str(path), "EG"], [str(path), "UCB1"]]


def test_the_selectors_own_time_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each of the two calls of a step takes a second, and so does the step.
    monkeypatch.setattr(regret, "perf_counter", count().__next__)
    found = simulate(make_simulator(), PredefinedSelector(ONE), 0)
    assert (found.seconds, found.choosing) == (100, 2)


def test_settings_above_the_floor_are_listed() -> None:
    def row(simulator: str, selector: str, regrets: list[float]) -> ResultRow:
        return ResultRow(
            benchmark="selector",
            case=simulator,
            contender=selector,
            dtype="",
            threads=None,
            seconds=Spread.of([1.0]),
            machine=this_machine(),
            values={"regret_warm": Spread.of(regrets)},
        )

    rows = [
        row("even", "cost model", [0.0, FLOOR, 0.5]),
        row("rough", "cost model", [0.0, FLOOR + 0.01, 0.5]),
        row("other", "EG", [0.5]),
    ]
    assert missed(rows) == ["rough"]
