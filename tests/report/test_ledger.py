"""Where the wall time went."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.report.ledger import gantt, ledger_of, step_parts
from slipstream.report.read import Record, read_run
from tests.report.made import STEP, make_run


def test_parts_are_each_measured_and_the_rest_is_told(tmp_path: Path) -> None:
    ledger = ledger_of(read_run(make_run(tmp_path)))
    assert ledger is not None
    assert ledger.wall == pytest.approx(30.0)
    assert ledger.parts == pytest.approx(
        {
            "start-up": 3.0,
            "set-up": 2.0,
            "prefill": 0.4,
            "decode, plain": 0.8,
            "draft": 1.0,
            "verify": 1.6,
            "engine idle": 0.2,
            "reward": 2.0,
            "train policy": 8.0,
            "weight sync": 1.0,
            "rest of the step": 1.0,
            "writing rollouts": 2.0,
            "validation": 1.0,
            "checkpoints": 0.5,
            # 1 s before the first step and 4.5 s after the last span.
            "not measured": 5.5,
        }
    )
    assert sum(ledger.parts.values()) == pytest.approx(ledger.wall)
    assert ledger.unexplained == pytest.approx(5.5 / 30)


def test_an_engine_that_does_not_measure_itself_has_one_part() -> None:
    data = {name: value for name, value in STEP.items() if "/gen/" not in name}
    parts = step_parts(Record(1, data))
    assert parts["generation"] == 1.0
    assert sum(parts.values()) == pytest.approx(data["timing_s/step"])
    assert sum(step_parts(Record(1, STEP)).values()) == pytest.approx(STEP["timing_s/step"])


def test_phases_that_are_no_steps_count_whole_and_only_once(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=1)
    path = folder / "events.jsonl"
    *events, stop = path.read_text().splitlines()
    inner = [
        {"time": 120.0, "event": "begin", "span": "draft"},
        {"time": 121.0, "event": "begin", "span": "save_checkpoint"},
        {"time": 122.0, "event": "end", "span": "save_checkpoint", "seconds": 1.0},
        {"time": 125.0, "event": "end", "span": "draft", "seconds": 5.0},
    ]
    path.write_text("\n".join([*events, *map(json.dumps, inner), stop]) + "\n")
    run = read_run(folder)
    ledger = ledger_of(run)
    assert ledger is not None
    assert ledger.parts["draft head before RL"] == 5.0
    assert ledger.parts["checkpoints"] == 0.5
    assert ("save_checkpoint", 21.0, 22.0) in gantt(run.processes)


def test_time_between_two_processes_is_nobodys(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"time": 1000.0, "event": "start"}\n')
        file.write('{"time": 1000.5, "event": "begin", "span": "setup"}\n')
        file.write('{"time": 1001.0, "event": "stop", "status": "finished"}\n')
    ledger = ledger_of(read_run(folder))
    assert ledger is not None
    assert ledger.wall == pytest.approx(31.0)
    assert ledger.parts["start-up"] == pytest.approx(3.5)


def test_without_a_timeline_nothing_is_said(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    (folder / "events.jsonl").unlink()
    run = read_run(folder)
    assert ledger_of(run) is None
    assert run.notes == [
        "no events.jsonl: made by an earlier version, and where time went is unknown"
    ]
