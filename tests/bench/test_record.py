"""Rows, spreads and the order of runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.bench.record import ResultRow, Spread, this_machine, write_rows
from slipstream.bench.timing import Times, alternate, ratio


def test_spread_is_median_and_extremes() -> None:
    assert Spread.of([4.0, 1.0, 3.0]) == Spread(median=3.0, min=1.0, max=4.0, n=3)
    assert Spread.of([1.0, 2.0]).median == 1.5
    assert Spread.of([1.0, 2.0, 6.0]).scaled(0.5) == Spread(median=1.0, min=0.5, max=3.0, n=3)


def test_ratio_goes_round_by_round() -> None:
    # A round in which the machine was half as fast is no outlier of the ratio.
    assert ratio([2.0, 4.0, 2.0], [1.0, 2.0, 1.0]) == Spread(median=2.0, min=2.0, max=2.0, n=3)


def test_contenders_take_turns_and_the_warm_up_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = busy = 0.0
    calls: list[str] = []
    cost = {"a": 1.0, "b": 10.0}

    def work(name: str) -> None:
        nonlocal clock, busy
        calls.append(name)
        clock += cost[name] * (100.0 if len(calls) <= 2 else 1.0)
        busy += cost[name] / 4

    monkeypatch.setattr("time.perf_counter", lambda: clock)
    monkeypatch.setattr("time.process_time", lambda: busy)
    times = alternate({"a": lambda: work("a"), "b": lambda: work("b")}, rounds=2)
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert times == {"a": Times([1.0, 1.0], [0.25, 0.25]), "b": Times([10.0, 10.0], [2.5, 2.5])}


def test_a_contender_in_another_process_has_its_own_cpu_clock() -> None:
    used = 0.0

    def work() -> None:
        nonlocal used
        used += 2.5

    times = alternate({"a": work}, rounds=2, cpu_clocks={"a": lambda: used})
    assert times["a"].cpu == [2.5, 2.5]


def test_rows_are_written_with_their_circumstances(tmp_path: Path) -> None:
    row = ResultRow(
        benchmark="train",
        case="step",
        contender="slipstream",
        dtype="float32",
        threads=1,
        seconds=Spread.of([0.5, 0.25]),
        machine=this_machine(),
        values={"share": Spread.of([0.5]), "flops": 3.0},
        settings={"shape": "tiny"},
    )
    file = tmp_path / "new" / "rows.json"
    write_rows(file, [row])
    (read,) = json.loads(file.read_text())["rows"]
    assert read["seconds"] == {"median": 0.375, "min": 0.25, "max": 0.5, "n": 2}
    assert read["values"] == {"share": {"median": 0.5, "min": 0.5, "max": 0.5, "n": 1}, "flops": 3}
    assert read["machine"]["cpu"]
    assert read["machine"]["cores"] >= 1
    assert {"python", "torch", "transformers", "slipstream-rl"} <= set(read["machine"]["versions"])
