"""The timeline of a real run: its report has all data, and its times add up."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest

from slipstream.cli import main
from slipstream.metrics.timeline import read_timeline
from slipstream.report.ledger import REST, ledger_of
from slipstream.report.page import payload
from slipstream.report.read import read_run
from tests.run.helpers import rl_only, tiny

DRAFTS = (
    "speculative.enable=true",
    "speculative.eagle.tune_algorithm=PREDEFINED",
    "speculative.eagle.spec_steps=2",
    "speculative.train.enable_drafter_training=true",
)


def test_run_folder_has_the_data_of_its_report(tmp_path: Path) -> None:
    assert main(tiny(tmp_path / "run", *DRAFTS)) == 0
    run = read_run(tmp_path / "run")
    assert (run.state, run.notes) == ("finished", [])
    (process,) = run.processes
    # Set-up has several spans.
    names = [name for name, _ in groupby(span.name for span in process.spans)]
    assert names == ["setup", "sft", "setup", "rl"]
    assert {"cpu", "cores", "torch", "slipstream", "threads"} <= run.environment.keys()
    for record in run.steps:
        parts = [value for name, value in record.data.items() if name.startswith("timing_s/gen/")]
        assert sum(parts) == pytest.approx(record.data["timing_s/gen"])
        # Prefill, plain decoding and waiting. With drafts also drafting and verification.
        assert len(parts) == (5 if "spec/plan" in record.data else 3)
        # The remainders are not negative, so no time is counted twice.
        assert record.data["timing_s/gen/wait"] >= 0
        assert record.data["timing_s/other"] >= 0
    assert any("spec/plan" in record.data for record in run.steps)
    assert sorted(run.tokens) == [1, 2]
    for rows in run.tokens.values():
        assert len(rows) == 2
    drafted = "".join(row["drafted"] for rows in run.tokens.values() for row in rows)
    assert "1" in drafted
    ledger = ledger_of(run)
    assert ledger is not None
    # Spans do not overlap and cover nearly all of the time. About 2 % of this run of one second is
    # between spans; more on a busy machine.
    assert ledger.parts[REST] >= 0
    assert ledger.unexplained < 0.2
    shown = payload([run])
    assert {"seconds", "depths", "reward", "accuracy"} <= {chart["id"] for chart in shown["charts"]}
    assert shown["runs"][0]["plans"] is not None


def test_timeline_of_a_resumed_run_has_two_processes(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert main(rl_only(folder, "trainer.total_training_steps=1")) == 0
    assert main(rl_only(folder, "trainer.total_training_steps=2")) == 0
    run = read_run(folder)
    assert [process.status for process in run.processes] == ["finished", "finished"]
    assert [record.step for record in run.steps] == [1, 2]
    # If the run starts over, so does its timeline.
    again = rl_only(folder, "trainer.total_training_steps=1", "trainer.resume_mode=disable")
    assert main(again) == 0
    processes, _ = read_timeline(folder / "events.jsonl")
    assert len(processes) == 1


def test_timeline_records_the_error_of_a_failed_run(tmp_path: Path) -> None:
    assert main(rl_only(tmp_path / "run", "data.max_prompt_length=1")) != 0
    processes, _ = read_timeline(tmp_path / "run" / "events.jsonl")
    assert [process.status is not None and "Error" in process.status for process in processes] == [
        True
    ]
