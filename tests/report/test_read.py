"""Run folders are read in every state."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import pytest

from slipstream.cli import main
from slipstream.errors import DataError
from slipstream.report.page import payload
from slipstream.report.read import read_run
from tests.report.run_folders import STEP, line, make_run, sample


def test_a_finished_run_is_read_completely(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "mine"))
    assert (run.name, run.state, run.notes) == ("mine", "finished", [])
    assert [record.step for record in run.rl] == [0, 1, 2, 3, 4]
    assert [record.step for record in run.steps] == [1, 2, 3, 4]
    assert run.config["data"] == {"task": "countdown"}
    assert run.environment == {"cpu": "A processor", "slipstream": "0.1.0"}
    assert sorted(run.tokens) == [1, 3, 4]
    assert run.lengths == {1: [10, 11, 12], 4: [40, 41, 42]}
    assert run.tokens[4][0]["pieces"] == ["1", " +", " <b>"]


def test_start_and_end_of_a_very_long_response_are_kept(tmp_path: Path) -> None:
    folder, n = make_run(tmp_path), 30_000
    row = sample(4) | {
        "pieces": [f" {i}" for i in range(n)],
        "log_probs": [-0.5] * n,
        "drafted": "1" * n,
        "masked": "0" * n,
    }
    (folder / "rollouts" / "tokens" / "4.jsonl").write_text(json.dumps(row) + "\n")
    (shown,) = read_run(folder).tokens[4]
    assert (shown["tokens"], shown["of_drafts"], shown["gap"]) == (n, n, 1500)
    assert [shown["pieces"][i] for i in (1499, 1500, 1501, -1)] == [
        " 1499", "\n[28000 tokens omitted]\n", " 29500", " 29999",
    ]  # fmt: skip
    assert [len(shown[name]) for name in ("log_probs", "drafted", "masked")] == [2001] * 3
    assert (shown["masked"].count("1"), shown["masked"][1500]) == (1, "1")


def test_turns_of_an_episode_are_labels_of_their_first_tokens(tmp_path: Path) -> None:
    folder, n = make_run(tmp_path), 3000
    parts = [
        {"at": 0, "role": "assistant", "branch": 0, "rewards": {"look_up": -0.03}},
        {"at": 1000, "role": "tool", "branch": 0, "rewards": {}},
        {"at": 1600, "role": "assistant", "branch": 0, "rewards": {}},
        {"at": 2900, "role": "assistant", "branch": 1, "rewards": {"end": 1}},
    ]
    long = {"pieces": ["x"] * n, "log_probs": [0] * n, "drafted": "0" * n, "masked": "0" * n}
    row = sample(4) | long | {"parts": parts}
    (folder / "rollouts" / "tokens" / "4.jsonl").write_text(json.dumps(row) + "\n")
    (shown,) = read_run(folder).tokens[4]
    # 1000 tokens are omitted, and the turn that begins in them has no label.
    assert shown["labels"] == {
        0: "turn 1, look_up -0.03",
        1000: "tool",
        1901: "branch 2, turn 3, end +1",
    }


def test_a_folder_without_a_run_is_refused_and_lists_runs_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DataError, match=r"is not a folder; give the folder of a run"):
        read_run(tmp_path / "none")
    make_run(tmp_path / "runs" / "mine")
    with pytest.raises(DataError, match=r"no run: .*: mine\. Give .*trainer\.default_local_dir"):
        read_run(tmp_path / "runs")
    (tmp_path / "empty").mkdir()
    assert main(["report", str(tmp_path / "empty")]) == DataError.exit_code
    assert "no run: none of config.yaml, events.jsonl" in capsys.readouterr().err
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_run_that_has_just_started_is_empty(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("trainer: {}\n")
    run = read_run(tmp_path)
    assert (run.rl, run.steps, run.tokens, run.lengths) == ([], [], {}, {})


def test_incomplete_and_damaged_lines_are_skipped(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("nonsense\n" + line(5, 130.0, STEP) + '{"step": 6, "da')
    run = read_run(folder)
    assert [record.step for record in run.steps] == [1, 2, 3, 4, 5]
    assert run.notes == ["metrics.jsonl: 1 line could not be read"]


def test_the_last_record_of_a_repeated_step_counts(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(line(4, 130.0, STEP | {"critic/score/mean": 0.75}))
    assert read_run(folder).steps[-1].data["critic/score/mean"] == 0.75


def test_a_run_of_another_version_is_read_as_far_as_possible(tmp_path: Path) -> None:
    folder = make_run(tmp_path, config="trainer: [of, another, shape\n")
    (folder / "rollouts" / "tokens" / "4.jsonl").write_text('{"pieces": ["a"]}\n')
    (folder / "rollouts" / "1.jsonl").write_text('{"output": "x"}\n')
    old = (folder / "metrics.jsonl").read_text().replace('"time": 106.0, ', "")
    (folder / "metrics.jsonl").write_text(old)
    run = read_run(folder)
    assert (run.config, run.rl[0].time, len(run.steps)) == ({}, None, 4)
    assert run.notes == [
        "config.yaml cannot be read (ParserError)",
        "the samples of step 4 cannot be read (KeyError)",
        "the rollouts of step 1 cannot be read (KeyError)",
    ]


def test_samples_are_found_from_another_working_directory_or_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = tmp_path / "started"
    folder = make_run(tmp_path / "runs", config="trainer:\n  rollout_data_dir: dumps\n")
    start, *events = (folder / "events.jsonl").read_text().splitlines(keepends=True)
    first = json.dumps(json.loads(start) | {"cwd": str(started)}) + "\n"
    (folder / "events.jsonl").write_text("".join([first, *events]))
    monkeypatch.chdir(tmp_path)
    missing = read_run(folder)
    assert missing.tokens == {}
    assert "trainer.rollout_data_dir=dumps not found: no samples are shown" in missing.notes
    started.mkdir()
    (folder / "rollouts").rename(started / "dumps")
    found = read_run(folder)
    assert list(found.tokens) == [1, 3, 4]
    assert found.notes == []


def test_the_lock_tells_whether_a_run_is_running(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    events = (folder / "events.jsonl").read_text().splitlines(keepends=True)
    (folder / "events.jsonl").write_text("".join(events[:4]))
    assert read_run(folder).state == "killed"
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
    try:
        assert read_run(folder).state == "killed"
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        run = read_run(folder)
    finally:
        os.close(descriptor)
    assert run.state == "running"
    # Its last known activity is its last logged step.
    assert run.processes[0].seconds == 24.0


def test_the_folder_of_a_draft_run_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("trainer: {}\n")
    (tmp_path / "metrics.jsonl").write_text(line(1, 5.0, {"draft/loss": 2.0}))
    run = read_run(tmp_path)
    assert (run.rl, [record.data for record in run.draft]) == ([], [{"draft/loss": 2.0}])


def test_unexpected_types_in_settings_and_samples_are_tolerated(tmp_path: Path) -> None:
    folder = make_run(tmp_path, config="trainer: a text\n")
    row = sample(4) | {"gts": 3, "stop_reason": 7, "failure": ["x"]}
    (folder / "rollouts" / "tokens" / "4.jsonl").write_text(json.dumps(row) + "\n")
    run = read_run(folder)
    assert (run.trainer, run.notes) == ({}, [])
    shown = run.tokens[4][0]
    assert (shown["gts"], shown["stop_reason"], shown["failure"]) == ("3", "7", "['x']")
    assert payload([run])["runs"][0]["tiles"][0] == ["RL steps", "4", "finished"]
