"""The cache folder of compiled code."""

from __future__ import annotations

from pathlib import Path

import pytest
from numba import config

import slipstream
from slipstream.kernels import compiling


def folder() -> Path | None:
    found = compiling.cache_folder.__wrapped__()
    return None if found is None else Path(found)


def test_the_cache_folder_depends_on_all_source_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.py").write_text("one")
    monkeypatch.setattr(compiling, "__file__", str(tmp_path / "compiling.py"))
    first = folder()
    assert first is not None
    assert first.is_dir()
    assert first == folder()
    # A change of any file, not only of the one with the function, must invalidate old code.
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


def test_the_home_folder_is_used_if_the_package_is_not_writable(
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


def test_numba_cache_dir_is_used_and_an_unwritable_one_gives_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "mine"))
    found = folder()
    assert found is not None
    assert found.parent == tmp_path / "mine"
    (tmp_path / "file").write_text("no folder can be made here")
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="set NUMBA_CACHE_DIR to"):
        assert folder() is None


def test_the_cache_folder_of_other_numba_code_is_unchanged() -> None:
    before = config.CACHE_DIR
    with compiling._cached():
        assert before != config.CACHE_DIR
    assert before == config.CACHE_DIR
