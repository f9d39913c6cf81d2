"""Plans and selectors in turns, by batch size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.bench.record import median_of
from slipstream.bench.speculation import fixed_plans, grid, trained
from slipstream.bench.speculation.grid import SELECTOR, grid_table, run_grid
from slipstream.bench.speculation.rollout import PLAIN, TREES, SpeculationBench
from slipstream.errors import ConfigError, EngineError
from slipstream.inference.speculation.plan import DraftPlan
from tests.bench.toy import with_toy


def test_the_grid_has_a_row_for_each_plan_and_the_selector(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = with_toy(monkeypatch, grid, [(3, 4, 5 + i) for i in range(8)])
    monkeypatch.setattr(grid, "LEARNED", 20)
    bench = SpeculationBench(
        policy=Path("toy"), rounds=1, batches=(1, 2), new_tokens=30, least_responses=2
    )
    rows = run_grid(bench, print)
    names = [PLAIN, "off", "1_1_2", "2_1_3", "3_1_4", "5_1_6", "7_1_8", "11_1_12", *TREES, SELECTOR]
    assert [row.contender for row in rows] == 2 * names
    assert [row.case for row in rows] == ["batch 1"] * len(names) + ["batch 2"] * len(names)
    values: dict[str, Any] = {row.contender: row.values for row in rows}
    assert values[PLAIN]["accept_length"] == values["off"]["accept_length"] == 1.0
    assert 1.0 < values["1_1_2"]["accept_length"] <= 2.0
    assert values["7_1_8"]["accept_length"] > 1.0
    assert values[PLAIN]["over_plain"] == values[PLAIN]["same_tokens"] == 1.0
    assert 0 < values[SELECTOR]["over_best_fixed"] < 2
    assert values[SELECTOR]["standard_error"] > 0
    lines = grid_table(rows).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["batch", "batch"]
    assert lines[1].split()[2] == "1.00"
    # Natural responses end by themselves or at the limit.
    natural = trained.natural_responses(toy, 1.0, torch.float32)
    assert natural.lengths == [37] * 8


def test_plans_alone_are_compared_with_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    with_toy(monkeypatch, grid, [(3, 4, 5 + i) for i in range(4)])
    chain, tree = DraftPlan.parse("3_1_4"), DraftPlan.parse("2_2_4")
    bench = SpeculationBench(
        policy=Path("toy"),
        rounds=1,
        batches=(2,),
        new_tokens=30,
        least_responses=2,
        plans=(chain, tree),
        selectors=False,
    )
    rows = run_grid(bench, print)
    assert [row.contender for row in rows] == ["off", "3_1_4", "2_2_4"]
    lengths = [median_of(row.values["accept_length"]) for row in rows]
    assert [length > 1 for length in lengths] == [False, True, True]
    assert rows[0].values["over_off"] == 1.0
    assert grid_table(rows).splitlines()[0].split() == ["over", "off", "off", "3_1_4", "2_2_4"]
    with pytest.raises(ConfigError, match="3_1_4 3_1_4: name each once"):
        replace(bench, plans=(chain, chain))


def test_other_tokens_than_plain_decoding_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with_toy(monkeypatch, grid, [(3, 4, 5)] * 2, 20)
    make = trained.make_engine
    # Plain decoding was by 0.
    seeds = iter(range(1, 100))

    def wrong(*args: object, **settings: object) -> object:
        engine = make(*args, **settings)  # type: ignore[arg-type]
        run, seed = engine.run, next(seeds)

        def other(requests: list) -> object:  # type: ignore[type-arg]
            return run([replace(r, key=replace(r.key, seed=seed)) for r in requests])

        engine.run = other  # type: ignore[method-assign, assignment]
        return engine

    monkeypatch.setattr(fixed_plans, "make_engine", wrong)
    bench = SpeculationBench(
        policy=Path("toy"),
        rounds=1,
        batches=(1,),
        new_tokens=6,
        least_responses=1,
        selectors=False,
    )
    with pytest.raises(EngineError, match="a draft plan wrote other tokens than plain decoding"):
        run_grid(bench, print)
