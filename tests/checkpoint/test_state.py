"""`RunState` is saved and loaded; newer, truncated and foreign files are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.checkpoint.state import RunState, data_file, huggingface_folder, optimizer_file
from slipstream.errors import CheckpointError

STATE = RunState(
    step=7, phase="rl", threads=2, config={"trainer": {"seed": 1}}, policy_version=6,
    versions={"torch": "2"}, extra={"epoch": 1},
)  # fmt: skip


def test_run_state_round_trips(tmp_path: Path) -> None:
    STATE.save(tmp_path)
    assert RunState.load(tmp_path) == STATE
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]


def test_paths_of_checkpoint_files() -> None:
    root = Path("run/global_step_3")
    assert huggingface_folder(root) == Path("run/global_step_3/actor/huggingface")
    assert optimizer_file(root) == Path("run/global_step_3/actor/optimizer.safetensors")
    assert data_file(root) == Path("run/global_step_3/data.json")


def edit(folder: Path, **changes: object) -> None:
    STATE.save(folder)
    path = folder / "state.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in raw.items() if v != "REMOVE"}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 2}, "newer version of slipstream .format_version 2.*upgrade"),
        ({"format_version": None}, "format_version is None"),
        ({"step": "REMOVE", "threads": "REMOVE"}, "lacks step, threads"),
        ({"step": "7"}, "step is '7', not an integer"),
        ({"color": 1}, "unknown entries color"),
    ],
)
def test_invalid_entries_are_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    edit(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        RunState.load(tmp_path)


def test_missing_truncated_and_non_object_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"state\.json does not exist"):
        RunState.load(tmp_path)
    (tmp_path / "state.json").write_text('{"step": 1')
    with pytest.raises(CheckpointError, match=r"state\.json is corrupt"):
        RunState.load(tmp_path)
    (tmp_path / "state.json").write_text("[]")
    with pytest.raises(CheckpointError, match="list, not an object"):
        RunState.load(tmp_path)


def test_values_without_json_form_are_refused(tmp_path: Path) -> None:
    for value in (float("nan"), {1, 2}):
        with pytest.raises(CheckpointError, match=r"state\.json cannot be written as JSON"):
            RunState(step=1, phase="rl", threads=1, extra={"x": value}).save(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [("phase", 5), ("config", []), ("policy_version", "1"), ("versions", 3), ("extra", None)],
)
def test_odd_values_in_the_state_name_the_key(tmp_path: Path, key: str, value: object) -> None:
    RunState(step=1, phase="rl", threads=1).save(tmp_path)
    path = tmp_path / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(CheckpointError, match=rf"{key} is .*resume from another checkpoint"):
        RunState.load(tmp_path)


@pytest.mark.parametrize("text", ["[" * 5000, "9" * 6000, "\0"])
def test_a_state_that_no_parser_reads_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"state\.json.*resume from another checkpoint"):
        RunState.load(tmp_path)
