"""Charts contain the values of the metrics files."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.metrics.names import find
from slipstream.report.charts import SPECS, charts_of, number, steps_of
from slipstream.report.read import read_run
from tests.report.run_folders import make_run


def test_lines_have_the_values_of_the_records(tmp_path: Path) -> None:
    runs = [read_run(make_run(tmp_path / name)) for name in ("a", "b")]
    charts = {chart["id"]: chart for chart in charts_of(runs)}
    assert charts["reward"]["lines"] == [
        {"label": "reward", "run": run, "x": [1, 2, 3, 4], "y": [0.5] * 4} for run in (0, 1)
    ]
    accuracy = charts["accuracy"]["lines"][0]
    assert accuracy == {
        "label": "countdown", "run": 0, "x": [0, 4], "y": [0.4, 0.6], "low": [0.55, 0.55],
        "high": [0.65, 0.65],
    }  # fmt: skip
    assert [line["label"] for line in charts["lengths"]["lines"][:4]] == [
        "median", "mean", "90 %", "longest",
    ]  # fmt: skip
    assert [(line["label"], line["y"][0]) for line in charts["depths"]["lines"][:2]] == [
        ("depth 1", 0.9),
        ("depth 2", 0.7),
    ]
    seconds = {line["label"]: line["y"][0] for line in charts["seconds"]["lines"]}
    assert sum(seconds.values()) == pytest.approx(4.0)
    assert {line["run"] for line in charts["seconds"]["lines"]} == {0}
    # There are no charts of metrics that the runs have not logged.
    assert not {"kl", "sft_loss", "draft_loss", "values"} & charts.keys()


def test_minutes_exclude_the_time_between_processes(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    assert steps_of(read_run(folder))["rl"] == {
        "step": [0, 1, 2, 3, 4],
        "minutes": pytest.approx([6 / 60, 10.5 / 60, 15 / 60, 19.5 / 60, 24 / 60], rel=1e-4),
        "tokens": [0, 1000, 2000, 3000, 4000],
    }
    events = (folder / "events.jsonl").read_text()
    again = '{"time": 1000.0, "event": "start"}\n'
    (folder / "events.jsonl").write_text(events + again)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    lines[-1] = lines[-1].replace('"time": 124.0', '"time": 1006.0')
    (folder / "metrics.jsonl").write_text("".join(lines))
    # 30 s of the first process and 6 s of the second one.
    assert steps_of(read_run(folder))["rl"]["minutes"][-1] == pytest.approx(36 / 60)


def test_runs_without_times_have_no_minutes(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    (folder / "events.jsonl").unlink()
    assert steps_of(read_run(folder))["rl"]["minutes"] == []


def test_all_charted_metrics_are_in_the_table_of_metrics() -> None:
    unknown = [name for spec in SPECS for name in spec.of if find(name) is None]
    assert unknown == []


def test_numbers_are_rounded_and_non_finite_ones_removed() -> None:
    assert (number(1 / 3), number(123456.7), number(float("nan")), number(float("inf"))) == (
        0.33333, 123460.0, None, None,
    )  # fmt: skip
