"""The ledger splits the wall time of a run into parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.report.ledger import gantt, ledger_of, step_parts
from slipstream.report.read import Record, read_run
from tests.report.run_folders import STEP, line, make_run


def test_parts_and_unmeasured_rest_add_up_to_the_wall_time(tmp_path: Path) -> None:
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


def test_generation_is_one_part_without_engine_times() -> None:
    data = {name: value for name, value in STEP.items() if "/gen/" not in name}
    parts = step_parts(Record(1, data))
    assert parts["generation"] == 1.0
    assert sum(parts.values()) == pytest.approx(data["timing_s/step"])
    assert sum(step_parts(Record(1, STEP)).values()) == pytest.approx(STEP["timing_s/step"])


def test_phases_without_steps_are_one_part_without_double_counting(tmp_path: Path) -> None:
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
    assert ("checkpoints", 21.0, 22.0) in gantt(run.processes)


def lines_of(path: Path, *events: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(event) + "\n" for event in events))


DIED = [
    {"time": 0.0, "event": "start"},
    {"time": 1.0, "event": "begin", "span": "rl"},
    {"time": 31.0, "event": "end", "span": "rl", "seconds": 30.0},
    {"time": 31.0, "event": "stop", "status": "TrainingError: x"},
]
RESUMED = [
    {"time": 100.0, "event": "start"},
    {"time": 101.0, "event": "begin", "span": "rl"},
    {"time": 110.0, "event": "end", "span": "rl", "seconds": 9.0},
    {"time": 110.0, "event": "stop", "status": "finished"},
]


def test_steps_lost_by_a_crash_are_a_part(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=0)
    # One of the first process's six and a half steps remains; two are from the second process.
    records = [line(1, 5.5, STEP), line(2, 105.5, STEP), line(3, 110.0, STEP)]
    (folder / "metrics.jsonl").write_text("".join(records))
    lines_of(folder / "events.jsonl", *DIED, *RESUMED)
    ledger = ledger_of(read_run(folder))
    assert ledger is not None
    assert ledger.wall == 41.0
    assert ledger.parts["work lost to a stop"] == pytest.approx(25.5)
    assert ledger.parts["train policy"] == 6.0
    assert ledger.parts["not measured"] == pytest.approx(0.0, abs=1e-9)


def test_a_phase_without_remaining_records_is_lost_completely(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=0)
    (folder / "metrics.jsonl").write_text(line(1, 105.5, STEP) + line(2, 110.0, STEP))
    lines_of(folder / "events.jsonl", *DIED, *RESUMED)
    ledger = ledger_of(read_run(folder))
    assert ledger is not None
    assert ledger.parts["work lost to a stop"] == 30.0
    # A run stopped by its user has lost nothing, because it resumed at the same step.
    stopped = [*DIED[:-1], {"time": 31.0, "event": "stop", "status": "interrupted"}]
    lines_of(folder / "events.jsonl", *stopped, *RESUMED)
    ledger = ledger_of(read_run(folder))
    assert ledger is not None
    assert "work lost to a stop" not in ledger.parts


def test_records_without_time_are_not_counted(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=0)
    old = line(1, 0.0, STEP).replace('"time": 0.0, ', "")
    (folder / "metrics.jsonl").write_text(old * 9 + line(2, 105.5, STEP))
    lines_of(folder / "events.jsonl", *RESUMED)
    ledger = ledger_of(read_run(folder))
    assert ledger is not None
    assert (ledger.wall, ledger.parts["train policy"]) == (10.0, 2.0)
    assert ledger.parts["not measured"] >= 0


def test_time_between_processes_is_not_counted(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"time": 1000.0, "event": "start"}\n')
        file.write('{"time": 1000.5, "event": "begin", "span": "setup"}\n')
        file.write('{"time": 1001.0, "event": "stop", "status": "finished"}\n')
    ledger = ledger_of(read_run(folder))
    assert ledger is not None
    assert ledger.wall == pytest.approx(31.0)
    assert ledger.parts["start-up"] == pytest.approx(3.5)


def test_without_a_timeline_there_is_no_ledger(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    (folder / "events.jsonl").unlink()
    run = read_run(folder)
    assert ledger_of(run) is None
    (note,) = run.notes
    assert note.startswith("no events.jsonl: ")
