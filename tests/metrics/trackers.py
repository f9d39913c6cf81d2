"""Test helpers for trackers: hide user accounts, and read the files that trackers write."""

from __future__ import annotations

import json
import os
import sqlite3
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from slipstream.metrics.tracker import RUN_FILE


def without_user_account(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide credentials, settings and environment variables of the user who runs the tests."""
    for name in list(os.environ):
        if name.startswith(("WANDB", "MLFLOW", "TRACKIO", "NETRC", "HF_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("WANDB_DATA_DIR", str(home / "data"))


def imported_trackio(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import trackio with the folder `folder`.

    Trackio keeps the folder of its first import, so all tests of a process share that one.
    """
    if "trackio" not in sys.modules:
        monkeypatch.setenv("TRACKIO_DIR", str(folder))
    import trackio

    monkeypatch.setenv("TRACKIO_DIR", str(trackio.utils.TRACKIO_DIR))
    return trackio


def run_id(folder: Path, tracker: str) -> str:
    saved = json.loads((folder / tracker / RUN_FILE).read_text(encoding="utf-8"))
    return str(saved["id"])


def wandb_records(path: Path) -> Iterator[Any]:
    """Yield the records of a run's file, in LevelDB's log format after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    raw = path.read_bytes()
    assert raw[:4] == b":W&B"
    at, whole = 7, b""
    while at < len(raw):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", raw[at + 4 : at + 7])
        whole += raw[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            yield wandb_internal_pb2.Record.FromString(whole)
            whole = b""


def wandb_run(folder: Path) -> tuple[Any, dict[int, dict[str, Any]], list[int]]:
    """Return what one process wrote: the run, values by step, and exit codes."""
    (path,) = folder.glob("*.wandb")
    run, steps, ends = None, {}, []
    for record in wandb_records(path):
        if record.HasField("run"):
            run = record.run
        elif record.HasField("history"):
            items = record.history.item
            values = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items}
            steps[record.history.step.num] = values
        elif record.HasField("exit"):
            ends.append(record.exit.exit_code)
    return run, steps, ends


def wandb_table(folder: Path, values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of the generations table among the values of a step."""
    prefix = "val/generations/"
    assert values[prefix + "_type"] == "table-file"
    table = json.loads((folder / "files" / values[prefix + "path"]).read_text(encoding="utf-8"))
    return [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]


def mlflow_client(folder: Path) -> Any:
    """Return a client of the database in `folder`."""
    import mlflow

    return mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db")


def mlflow_history(client: Any, run: str, name: str) -> list[tuple[int, float]]:
    """Return (step, value) in the order of the steps."""
    return [(metric.step, metric.value) for metric in client.get_metric_history(run, name)]


def trackio_rows(trackio: Any, run: str, project: str = "project") -> list[tuple[int, Any]]:
    """Return (step, values) in the order of logging."""
    path = Path(trackio.utils.TRACKIO_DIR) / f"{project}.db"
    query = "SELECT step, metrics FROM metrics WHERE run_id = ? ORDER BY id"
    with closing(sqlite3.connect(path)) as database:
        return [(step, json.loads(text)) for step, text in database.execute(query, [run])]
