"""`load_named` loads an object by name from a file or module of a user."""

from __future__ import annotations

import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import ConfigError
from slipstream.user_code import load_named


def load(path: str | Path, name: str) -> Any:
    return load_named(path, name, path_key="a.path", name_key="a.name", what="classes")


def test_files_with_the_same_name_are_separate_modules(tmp_path: Path) -> None:
    for folder, value in (("one", 1), ("two", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(f"class Mine:\n    value = {value}\n")
    one, two = (load(tmp_path / folder / "mine.py", "Mine") for folder in ("one", "two"))
    assert (one.value, two.value) == (1, 2)
    assert pickle.loads(pickle.dumps(one)) is one


def test_pkg_path_imports_a_module_by_its_dotted_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "package_of_mine").mkdir()
    (tmp_path / "package_of_mine" / "data.py").write_text("class Mine: pass\n")
    assert load("pkg://package_of_mine.data", "Mine").__module__ == "package_of_mine.data"
    with pytest.raises(ConfigError, match=r"a\.path 'pkg://package_of_mine\.no' does not import"):
        load("pkg://package_of_mine.no", "Mine")


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("class Mine: pass", "Mime", "a.name 'Mime' is not in"),
        ("class Mine: pass", "Mime", "did you mean Mine? It defines: Mine"),
        ("x = 1", "x", "It defines: no classes"),
        ("from pathlib import Path", "Mine", "It defines: no classes"),
        ("1 / 0", "Mine", "does not import: ZeroDivisionError: division by zero"),
        ("def", "Mine", "does not import: SyntaxError"),
    ],
)
def test_missing_name_or_failing_import_is_reported(
    tmp_path: Path, source: str, name: str, message: str
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(source)
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(path, name)


def test_path_that_is_no_python_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a\.path 'absent\.py' is not a file"):
        load("absent.py", "Mine")
    (tmp_path / "mine.txt").write_text("class Mine: pass")
    with pytest.raises(ConfigError, match=r"is not a Python file: its name must end in \.py"):
        load(tmp_path / "mine.txt", "Mine")
