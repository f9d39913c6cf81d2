"""Where compiled code is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from numba import config

import slipstream
from slipstream.kernels import compiling


def folder() -> Path | None:
    found = compiling.cache_folder.__wrapped__()
    return None if found is None else Path(found)


def test_compiled_code_lies_in_a_folder_named_after_the_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.py").write_text("one")
    monkeypatch.setattr(compiling, "__file__", str(tmp_path / "compiling.py"))
    first = folder()
    assert first is not None
    assert first.is_dir()
    assert first == folder()
    # Another file than the one a function stands in has changed: old code must not be found.
    (tmp_path / "b.py").write_text("two")
    second = folder()
    assert second != first
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "c.py").write_text("three")
    assert folder() not in (first, second)


def test_every_file_that_is_compiled_is_a_source() -> None:
    package = Path(slipstream.__file__).parent
    compiled = {
        path
        for path in (package / "kernels").rglob("*.py")
        if "kernels.compiling import" in path.read_text(encoding="utf-8")
    }
    assert package / "kernels" / "draft" / "tree.py" in compiled
    assert compiled < set(compiling.source_files())
    assert package / "tree_size.py" in compiling.source_files()


def test_where_the_package_cannot_be_written_the_home_folder_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, home = tmp_path / "package", tmp_path / "home"
    here.mkdir()
    (here / "__pycache__").write_text("no folder can be made here")
    monkeypatch.setattr(compiling, "__file__", str(here / "compiling.py"))
    monkeypatch.setenv("HOME", str(home))
    found = folder()
    assert found is not None
    assert found.parent == home / ".cache" / "slipstream"


def test_a_folder_of_the_users_choice_and_none_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "mine"))
    found = folder()
    assert found is not None
    assert found.parent == tmp_path / "mine"
    (tmp_path / "taken").write_text("no folder can be made here")
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "taken"))
    with pytest.warns(UserWarning, match="set NUMBA_CACHE_DIR to a folder that can be written"):
        assert folder() is None


def test_other_users_of_numba_keep_their_folder() -> None:
    before = config.CACHE_DIR
    with compiling._cached():
        assert before != config.CACHE_DIR
    assert before == config.CACHE_DIR
