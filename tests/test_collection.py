"""All folders with tests are collected."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest


def test_no_folder_with_tests_is_left_out(pytestconfig: pytest.Config) -> None:
    """By default, pytest leaves out folders that are named `build`."""
    left_out = pytestconfig.getini("norecursedirs")
    folders = {path.parent for path in Path(__file__).parent.rglob("test_*.py")}
    names = {part for folder in folders for part in folder.relative_to(Path(__file__).parent).parts}
    assert "build" in names
    assert [n for n in sorted(names) for pattern in left_out if fnmatch(n, pattern)] == []
