"""Whole runs with every tracker, with the real libraries and without a network."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli import main
from slipstream.metrics.loggers import read_jsonl
from slipstream.metrics.tracker import RUN_FILE
from slipstream.run.folder import set_aside
from tests.metrics.trackers import (
    imported_trackio,
    mlflow_client,
    mlflow_history,
    run_id,
    trackio_rows,
    wandb_run,
    without_user_account,
)
from tests.run.helpers import records_of, rl_only, tiny, write_reward

SETTINGS = ("sft.total_training_steps=1", "trainer.log_val_generations=2", "data.val_size=2")


@pytest.fixture(autouse=True)
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The wandb library, offline and without a user account."""
    without_user_account(tmp_path, monkeypatch)
    monkeypatch.setenv("WANDB_MODE", "offline")
    import wandb

    yield wandb
    wandb.teardown()


@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")
def test_trackers_have_the_metrics_of_the_metrics_file(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    wandb: Any,
) -> None:
    trackio = imported_trackio(tmp_path_factory.mktemp("trackio"), monkeypatch)
    folder, reward = tmp_path / "run", write_reward(tmp_path)
    loggers = "trainer.logger=[console,file,wandb,mlflow,trackio]"
    assert main(tiny(folder, *SETTINGS, loggers, reward=reward)) == 0
    output, error = capfd.readouterr()
    assert error == ""
    for said in ("wandb: offline; to send", "mlflow: mlflow ui --backend", "trackio: trackio show"):
        assert output.count(said) == 2, "once a phase"
    assert not [line for line in output.splitlines() if line.startswith(("*", "wandb: Run"))]
    # Resume for one more step.
    more = (loggers, "trainer.total_training_steps=3")
    assert main(tiny(folder, *SETTINGS, *more, reward=reward)) == 0
    wandb.teardown()  # as at the end of a process: its service has written everything
    lines = dict(read_jsonl(folder / "metrics.jsonl"))
    assert sorted(lines) == [0, 1, 2, 3]
    rewards = {step: lines[step]["critic/score/mean"] for step in (1, 2, 3)}

    processes = [wandb_run(path) for path in sorted((folder / "wandb").glob("offline-run-*"))]
    assert {run.run_id for run, _, _ in processes} == {run_id(folder, "wandb")}
    assert [sorted(steps) for _, steps, _ in processes] == [[0, 1, 2], [3]]
    steps = {**processes[0][1], **processes[1][1]}
    assert {step: steps[step]["critic/score/mean"] for step in rewards} == rewards
    config = {item.key: json.loads(item.value_json) for item in processes[0][0].config.update}
    assert config["trainer"]["total_training_steps"] == 2

    client = mlflow_client(folder / "mlflow")
    run = run_id(folder, "mlflow")
    assert dict(mlflow_history(client, run, "critic/score/mean")) == rewards
    sft = client.get_run(run_id(folder / "sft", "mlflow"))
    assert sft.info.run_name == "tiny-sft"
    assert sft.data.params["trainer.total_training_steps"] == "2"

    logged = trackio_rows(trackio, run_id(folder, "trackio"), "slipstream")
    scores = {s: m["critic/score/mean"] for s, m in logged if "critic/score/mean" in m}
    assert scores == rewards

    # Step 2 was the last one of the first run, which therefore validated after it.
    tables = {step: m["val/generations"]["_value"] for step, m in logged if "val/generations" in m}
    assert sorted(tables) == [0, 2, 3]
    recorded = records_of(folder / "validation")["2.jsonl"]
    assert tables[2] == [
        {
            "step": 2,
            "data_source": "countdown",
            "prompt": record["input"],
            "response": record["text"],
            "ground_truth": str(record["gts"]),
            "score": record["score"],
        }
        for record in recorded
    ]
    path = folder / "mlflow" / "artifacts" / run / "artifacts" / "val" / "generations.json"
    table = json.loads(path.read_text(encoding="utf-8"))
    assert [row[0] for row in table["data"]] == [0, 0, 2, 2, 3, 3]


def test_logger_without_credentials_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WANDB_MODE")
    assert main(rl_only(tmp_path / "run", "trainer.logger=[console,wandb]")) == 2
    assert "no API key" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_starting_over_moves_the_files_of_trackers(tmp_path: Path) -> None:
    for name in ("wandb", "mlflow", "trackio"):
        (tmp_path / name).mkdir()
        (tmp_path / name / RUN_FILE).write_text("{}")
    moved = set_aside(tmp_path)
    assert moved is not None
    assert sorted(path.name for path in moved.iterdir()) == ["mlflow", "trackio", "wandb"]
    assert [path.name for path in tmp_path.iterdir()] == [moved.name]
