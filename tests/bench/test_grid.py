"""Plans and selectors in turns, by batch size."""

from __future__ import annotations

import random
from dataclasses import replace
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.bench import grid, trained
from slipstream.bench.grid import SELECTOR, SETTLED, TURN, apart, grid_table, run_grid
from slipstream.bench.record import median_of
from slipstream.bench.speculation import PLAIN, TREES, SpeculationBench, plans
from slipstream.bench.trained import Responses
from slipstream.errors import ConfigError, EngineError
from slipstream.inference.speculation.plan import OFF, DraftPlan
from slipstream.inference.speculation.selector import StepRecord
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


def of_lengths(lengths: list[int]) -> Responses:
    return Responses([], [[0] * length for length in lengths])


def test_a_batch_of_few_has_longer_responses_where_there_are_any() -> None:
    bench, long = SpeculationBench(policy=Path("toy")), of_lengths([613] * 20 + [200] * 30)
    lengths = [grid._length(bench, long, size, 20) for size in (1, 4, 8, 16, 64)]
    assert lengths == [256, 256, 128, 64, 64]
    assert grid._length(bench, long, 4, 24) == 200
    assert grid._length(bench, of_lengths([50] * 24), 4, 24) == 64  # which are refused then


def test_plans_take_turns_of_which_settled_steps_of_full_batches_count() -> None:
    turns = grid._PlansInTurns(2, plans())
    told = []
    for step in range(2 * len(plans()) * TURN):
        plan = turns.select(2)
        told.append(plan)
        drafted = [plan.steps] * 2 if plan != OFF else []
        running = 1 if step % TURN == TURN - 1 else 2
        record = StepRecord(
            running=running,
            plan=plan,
            seconds=1.0 + step,
            drafted=drafted[:running],
            accepted=drafted[:running],
        )
        turns.record(record)
    order = [*plans(), *reversed(plans())]
    assert told == [plan for plan in order for _ in range(TURN)]
    for plan in plans():
        first, second = turns.seconds[plan]
        assert len(first) == len(second) == TURN - SETTLED - 1
        assert turns.made[plan] == [1.0 + plan.steps] * len(first + second)
    # Where no drafts were made, though told so, it is no step of the plan's.
    while turns.select(2) == OFF:
        pass
    for _ in range(SETTLED):
        turns.select(2)
    turns.record(StepRecord(running=2, plan=OFF, seconds=1.0))
    assert turns.seconds[plans()[1]][-1] == []


def test_contenders_are_told_apart_by_less_than_the_machine_changes() -> None:
    # Between turns it may be twice as fast, and one contender in ten is disturbed.
    rng = random.Random(0)
    own = [0.0, log(1.04), -log(1.2)]
    logs = np.empty((3, 60))
    for turn in range(60):
        mood = rng.choice([0.0, log(2)])
        for i, true in enumerate(own):
            disturbed = 1.0 if rng.random() < 0.1 else 0.0
            logs[i, turn] = true + mood + disturbed + 0.03 * rng.gauss(0, 1)
    logs[1, 7] = np.nan
    found, error = apart(logs)
    for true, by in zip(own, found, strict=True):
        assert exp(by - found[0]) == pytest.approx(exp(true), rel=0.015)
    # 0.03 of noise in 60 turns.
    assert error == pytest.approx(1.2533 * 0.03 / 60**0.5, rel=0.35)


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

    monkeypatch.setattr(grid, "make_engine", wrong)
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
