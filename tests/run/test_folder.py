"""Run folders that cannot be made are refused with a remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.errors import CheckpointError
from slipstream.run.folder import forget_after, locked


@pytest.mark.parametrize("name", ["file/inside", "loop/inside", "a" * 300, "a\0b", "\ud800"])
def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    match = r"set trainer\.default_local_dir"
    with pytest.raises(CheckpointError, match=match), locked(tmp_path / name):
        pass


def test_a_folder_in_place_of_the_lock_file_is_refused(tmp_path: Path) -> None:
    with locked(tmp_path):
        (lock,) = tmp_path.iterdir()
    lock.unlink()
    lock.mkdir()
    with pytest.raises(CheckpointError, match="Is a directory; set trainer"), locked(tmp_path):
        pass


def test_files_with_odd_digits_are_no_records(tmp_path: Path) -> None:
    for name in ("²", "٣", "9" * 200, "2"):
        (tmp_path / f"{name}.jsonl").write_text("")
    forget_after(tmp_path, 1)
    assert not (tmp_path / "2.jsonl").exists()
    assert len(list(tmp_path.iterdir())) == 3
