"""`CheckpointManager` saves, finds, prunes and verifies checkpoints."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from slipstream.checkpoint import manager as module
from slipstream.checkpoint.manager import CheckpointManager, verify
from slipstream.checkpoint.tree import save_tree
from slipstream.errors import CheckpointError, ConfigError


def writer(text: str, size: int = 0) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "actor").mkdir()
        (folder / "actor" / "weights").write_text(text)
        (folder / "data.json").write_bytes(b"x" * size)

    return write


def content(path: Path | None) -> str:
    assert path is not None
    return (path / "actor" / "weights").read_text()


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir())


def test_save_writes_verls_layout_and_tracker(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "run", keep=None)
    assert manager.latest() is None
    assert manager.steps() == []
    path = manager.save(12, writer("a"))
    assert path == tmp_path / "run" / "global_step_12"
    assert names(tmp_path / "run") == ["global_step_12", "latest_checkpointed_iteration.txt"]
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text() == "12"
    assert manager.latest() == path
    verify(path)


def test_keep_prunes_in_the_order_of_saving(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep=2)
    for step in (10, 20, 30):
        manager.save(step, writer(str(step)))
    assert manager.steps() == [20, 30]
    manager.save(21, writer("rolled back"))
    assert manager.steps() == [21, 30]
    assert content(manager.latest()) == "rolled back"
    manager.save(22, writer("22"))
    assert manager.steps() == [21, 22]


def test_keep_one_and_keep_all(tmp_path: Path) -> None:
    one, every = (CheckpointManager(tmp_path / name, keep=k) for name, k in (("a", 1), ("b", None)))
    for step in range(4):
        one.save(step, writer(""))
        every.save(step, writer(""))
    assert (one.steps(), every.steps()) == ([3], [0, 1, 2, 3])
    assert names(tmp_path / "a") == ["global_step_3", "latest_checkpointed_iteration.txt"]
    with pytest.raises(ConfigError, match="keep is 0"):
        CheckpointManager(tmp_path, keep=0)


def test_saving_an_existing_step_replaces_it(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep=3)
    manager.save(1, writer("old"))
    manager.save(2, writer("two"))
    path = manager.save(1, writer("new"))
    assert content(path) == "new"
    assert manager.latest() == path
    verify(path)
    assert names(tmp_path) == [
        "global_step_1", "global_step_2", "latest_checkpointed_iteration.txt",
    ]  # fmt: skip


def test_folders_not_written_by_the_manager_are_not_changed(tmp_path: Path) -> None:
    (tmp_path / "global_step_1").mkdir()
    (tmp_path / "notes").mkdir()
    manager = CheckpointManager(tmp_path, keep=1)
    manager.save(2, writer(""))
    manager.save(3, writer(""))
    assert manager.steps() == [3]
    assert {"global_step_1", "notes"} <= set(names(tmp_path))
    with pytest.raises(
        CheckpointError,
        match=r"not replaced; move it away or set another trainer\.default_local_dir",
    ):
        manager.save(1, writer(""))


def test_invalid_tracker_raises_and_missing_tracker_is_tolerated(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep=None)
    for step in (3, 5):
        manager.save(step, writer(""))
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("4")
    with pytest.raises(
        CheckpointError, match=r"names step 4, .*: 3, 5\..* trainer\.resume_mode=disable"
    ):
        manager.latest()
    tracker.write_text("")
    with pytest.raises(CheckpointError, match=r"'', not a step.*\(3, 5\)"):
        manager.latest()
    tracker.unlink()
    assert manager.latest() == tmp_path / "global_step_5"


def test_resolve_follows_the_resume_mode(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep=None)
    assert manager.resolve("auto", None) is None
    manager.save(1, writer("1"))
    manager.save(2, writer("2"))
    assert manager.resolve("auto", None) == tmp_path / "global_step_2"
    assert manager.resolve("disable", None) is None
    assert manager.resolve("resume_path", str(tmp_path / "global_step_1")) == (
        tmp_path / "global_step_1"
    )
    with pytest.raises(CheckpointError, match=r"not a global_step_N folder; steps under .*: 1, 2"):
        manager.resolve("resume_path", tmp_path / "global_step_9")
    with pytest.raises(CheckpointError, match="not a global_step_N folder"):
        manager.resolve("resume_path", tmp_path)
    (tmp_path / "x" / "global_step_3").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"manifest\.json does not exist"):
        manager.resolve("resume_path", tmp_path / "x" / "global_step_3")
    with pytest.raises(ConfigError, match=r"needs trainer\.resume_from_path"):
        manager.resolve("resume_path", None)
    with pytest.raises(ConfigError, match="'always'; use one of auto, disable, resume_path"):
        manager.resolve("always", None)
    (tmp_path / "global_step_2" / "actor" / "weights").write_text("3")
    with pytest.raises(CheckpointError, match="actor/weights has checksum"):
        manager.resolve("auto", None)


def test_verify_lists_every_bad_file(tmp_path: Path) -> None:
    path = CheckpointManager(tmp_path, keep=None).save(1, writer("abc", size=10))
    (path / "README.md").write_text("added later")
    verify(path)
    (path / "actor" / "weights").write_text("abd")
    (path / "data.json").write_bytes(b"x" * 9)
    with pytest.raises(
        CheckpointError,
        match=r"actor/weights has checksum .* instead of 352441c2; "
        r"data\.json has 9 bytes instead of 10",
    ):
        verify(path)
    (path / "data.json").unlink()
    with pytest.raises(CheckpointError, match=r"data\.json is missing"):
        verify(path)


def test_verify_refuses_newer_and_corrupt_manifests(tmp_path: Path) -> None:
    path = CheckpointManager(tmp_path, keep=None).save(1, writer(""))
    manifest = path / "manifest.json"
    whole = manifest.read_text()
    manifest.write_text(whole.replace('"format_version": 1', '"format_version": 2'))
    with pytest.raises(CheckpointError, match="newer version of slipstream"):
        verify(path)
    manifest.write_text(whole[:-9])
    with pytest.raises(CheckpointError, match=r"manifest\.json is corrupt"):
        verify(path)
    manifest.write_text('{"format_version": 1, "step": 1, "serial": 1, "files": {"a": 1}}')
    with pytest.raises(CheckpointError, match="files has 'a': 1, which is not a file of this"):
        verify(path)


def assert_first_checkpoint_unchanged(manager: CheckpointManager, root: Path) -> None:
    assert content(manager.latest()) == "first"
    verify(root / "global_step_1")
    assert names(root) == ["global_step_1", "latest_checkpointed_iteration.txt"]


def test_an_error_in_the_writer_leaves_no_partial_checkpoint(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep=1)
    manager.save(1, writer("first"))

    def broken(folder: Path) -> None:
        writer("half")(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        manager.save(2, broken)
    assert_first_checkpoint_unchanged(manager, tmp_path)


@pytest.mark.parametrize("place", ["write", "wrapped", "seal", "rename"])
def test_simulated_full_disk_raises_with_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    manager = CheckpointManager(tmp_path, keep=1)
    manager.save(1, writer("first", size=3000))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(folder: Path) -> None:
        writer("second", size=5 * 2**20)(folder)
        if place == "write":
            full()
        if place == "wrapped":
            try:
                full()
            except OSError as error:
                raise RuntimeError("could not write a shard") from error

    if place == "seal":
        monkeypatch.setattr(module, "fsync_tree", full)
    if place == "rename":
        monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(
        CheckpointError,
        match=r"disk full while saving .*global_step_2: .* free, at least 5\.0 MiB needed; "
        r".*global_step_1 stays the latest checkpoint\. Free some space",
    ):
        manager.save(2, write)
    monkeypatch.undo()
    assert_first_checkpoint_unchanged(manager, tmp_path)


def test_full_disk_while_replacing_keeps_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = CheckpointManager(tmp_path, keep=1)
    manager.save(1, writer("first"))
    rename = Path.rename

    def fail_once(path: Path, target: Path) -> Path:
        if path.name.startswith(".saving"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail_once)
    with pytest.raises(CheckpointError, match="disk full"):
        manager.save(1, writer("second"))
    monkeypatch.undo()
    assert_first_checkpoint_unchanged(manager, tmp_path)


def test_permission_error_at_the_first_save_raises_checkpoint_error(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        raise PermissionError(errno.EACCES, "no")

    with pytest.raises(CheckpointError, match=r"cannot save .*there is no earlier checkpoint"):
        CheckpointManager(tmp_path, keep=1).save(1, write)
    assert names(tmp_path) == []


def test_full_disk_is_reported_despite_an_invalid_tracker(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep=1)
    manager.save(1, writer("first"))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")

    def write(folder: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(CheckpointError, match=r"disk full while saving .*names step 7"):
        manager.save(2, write)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder with a file system of one megabyte."""
    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("mounting a tiny file system needs root and mount")
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mount is not permitted here: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("safetensors", [False, True])
def test_real_full_disk_keeps_the_previous_checkpoint(tiny_disk: Path, safetensors: bool) -> None:
    root = tiny_disk / "run"
    manager = CheckpointManager(root, keep=1)
    manager.save(1, writer("first"))

    def tensors(folder: Path) -> None:
        save_tree(folder / "optimizer.safetensors", torch.zeros(2**20))

    with pytest.raises(CheckpointError, match=r"disk full .*global_step_1 stays the latest"):
        manager.save(2, tensors if safetensors else writer("second", size=2**21))
    assert_first_checkpoint_unchanged(manager, root)
    manager.save(2, writer("second", size=2**19))
    assert content(manager.latest()) == "second"


def test_leftover_folders_are_removed_unless_locked(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep=None)
    dead = [tmp_path / f".{kind}.global_step_1.{'0' * 16}" for kind in ("saving", "deleting")]
    alive = tmp_path / f".saving.global_step_1.{'1' * 16}"
    for folder in (*dead, alive):
        folder.mkdir()
        (folder / "half").write_text("")
    with module._locked(alive, wait=False) as locked:
        assert locked
        manager.save(2, writer("2"))
        assert [alive.exists(), *(d.exists() for d in dead)] == [True, False, False]
    manager.save(3, writer("3"))
    assert not alive.exists()


def test_an_incomplete_replacement_is_undone(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep=None)
    path = manager.save(1, writer("old"))
    path.rename(tmp_path / f".replaced.global_step_1.{'0' * 16}")
    assert content(CheckpointManager(tmp_path, keep=None).latest()) == "old"
    assert names(tmp_path) == ["global_step_1", "latest_checkpointed_iteration.txt"]


def test_a_manifest_of_another_step_than_its_folders_is_refused(tmp_path: Path) -> None:
    path = CheckpointManager(tmp_path, keep=None).save(1, writer(""))
    other = path.rename(tmp_path / "global_step_7")
    with pytest.raises(CheckpointError, match=r"manifest of step 1, not of .* 7; give the folder"):
        verify(other)
    # A folder without a step in its name may hold any step.
    verify(other.rename(tmp_path / "best"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step", "1"),
        ("step", None),
        pytest.param("step", 10**400, id="huge"),
        ("step", -1),
        ("serial", "x"),
        ("serial", [1]),
        ("files", {"../x": {"size": 1, "crc32": "0"}}),
        ("files", {"/etc/passwd": {"size": 1, "crc32": "0"}}),
        ("files", {"a\0": {"size": 1, "crc32": "0"}}),
        ("files", {"\ud800": {"size": 1, "crc32": "0"}}),
        ("files", {"a": {"size": "1", "crc32": "0"}}),
        ("files", {"a": {"size": 1, "crc32": None}}),
        ("files", []),
    ],
)
def test_odd_values_in_a_manifest_are_refused(tmp_path: Path, key: str, value: object) -> None:
    path = CheckpointManager(tmp_path, keep=None).save(1, writer(""))
    manifest = path / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), key: value}))
    with pytest.raises(CheckpointError, match=rf"manifest\.json is corrupt: .*{key}") as caught:
        verify(path)
    assert "resume from another checkpoint" in str(caught.value)


@pytest.mark.parametrize("text", ["9" * 6000, "\u0663", "-1", "", "1e3", "\0"])
def test_odd_tracker_files_are_refused(tmp_path: Path, text: str) -> None:
    manager = CheckpointManager(tmp_path, keep=None)
    manager.save(1, writer(""))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
    with pytest.raises(CheckpointError, match=r"iteration\.txt contains .* existing step"):
        manager.latest()


def test_a_tracker_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep=None)
    manager.save(1, writer(""))
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    (tmp_path / "latest_checkpointed_iteration.txt").mkdir()
    with pytest.raises(CheckpointError, match=r"iteration\.txt: Is a directory; write an existing"):
        manager.latest()
