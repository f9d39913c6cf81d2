"""`load_named` loads an object by name from a file or module of a user."""

from __future__ import annotations

import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import ConfigError, DataError
from slipstream.user_code import called, created, load_named


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


@pytest.mark.parametrize(
    ("source", "message"),
    [
        # With a code, because libraries that replace `sys.exit` give a call without one the code 0.
        ("import sys; sys.exit(3)", "does not import: SystemExit: 3; remove the call of sys.exit"),
        ("import sys; sys.exit(0)", "does not import: SystemExit: 0; remove the call of sys.exit"),
        ("raise BaseException('b')", "does not import: BaseException: b"),
        ("raise GeneratorExit", "does not import: GeneratorExit"),
        ("import asyncio; raise asyncio.CancelledError", "does not import: CancelledError"),
        ("raise ValueError('x' * 10_000_000)", "does not import: ValueError: xxx"),
        ("import sys; del sys.modules[__name__]; 1 / 0", "does not import: ZeroDivisionError"),
        ("def __getattr__(name): raise SystemExit", "a.name 'Mine' cannot be read from"),
    ],
)
def test_whatever_a_file_raises_names_the_file(tmp_path: Path, source: str, message: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(source)
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        load(path, "Mine")
    assert str(path) in str(error.value)
    assert len(str(error.value)) < 3_000


def test_an_import_of_verl_names_the_package_to_import_instead(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    for line in ("from verl import DataProto", "import verl.utils.reward_score.gsm8k"):
        path.write_text(f"{line}\n")
        with pytest.raises(ConfigError, match=r"import slipstream\.compat\.verl instead of verl"):
            load(path, "Mine")
    path.write_text("from slime.utils.types import Sample\n")
    with pytest.raises(ConfigError, match=r"import slipstream\.compat\.slime instead of slime"):
        load(path, "Mine")
    path.write_text("import no_such_module_of_verl\n")
    with pytest.raises(ConfigError, match="does not import") as caught:
        load(path, "Mine")
    assert "slipstream.compat" not in str(caught.value)


def test_a_module_that_exits_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "exits_of_mine.py").write_text("import sys; sys.exit()\n")
    with pytest.raises(ConfigError, match=r"a\.path 'pkg://exits_of_mine' .*sys\.exit"):
        load("pkg://exits_of_mine", "Mine")


def test_ctrl_c_during_an_import_passes(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load(path, "Mine")


def test_an_object_that_refuses_questions_is_not_offered(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "class Proxy:\n"
        "    def __call__(self): pass\n"
        "    def __getattribute__(self, name): raise RuntimeError('outside of a request')\n"
        "proxy = Proxy()\n"
        "class Mine: pass\n"
    )
    with pytest.raises(ConfigError, match="It defines: Mine, Proxy"):
        load(path, "Other")


def test_a_function_that_exits_is_a_data_error() -> None:
    def exits() -> None:
        sys.exit()

    with pytest.raises(DataError, match=r"mine\(\) failed with SystemExit"):
        called(exits, "mine()")


def test_a_path_that_no_system_has_is_refused() -> None:
    for path in ("x" * 5_000, "~nobody_of_mine/x.py", "a\0b.py"):
        with pytest.raises(ConfigError, match=r"a\.path .* is not a file"):
            load(path, "Mine")


def test_path_that_is_no_python_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a\.path 'absent\.py' is not a file"):
        load("absent.py", "Mine")
    (tmp_path / "mine.txt").write_text("class Mine: pass")
    with pytest.raises(ConfigError, match=r"is not a Python file: its name must end in \.py"):
        load(tmp_path / "mine.txt", "Mine")


class Sized:
    def __init__(self, files: list[str], size: int = 1) -> None:
        if size < 0:
            raise ValueError("negative")
        self.files, self.size = files, size


class Table(dict[str, Any]):
    """Inherits a constructor without a signature."""


def test_a_class_is_created_with_both_sorts_of_arguments() -> None:
    made = created(Sized, {"files": ["a"]}, {"size": 2}, what="a.name=Sized", own_key="a.kwargs")
    assert (made.files, made.size) == (["a"], 2)


@pytest.mark.parametrize(
    ("cls", "own", "kind", "message"),
    [
        (Sized, {"files": 1}, ConfigError, r"a\.kwargs must not contain files"),
        (Sized, {"color": 1}, ConfigError, r"a\.name=X cannot be created.*'color'; set a\.kwargs"),
        (Table, {}, ConfigError, r"a\.name=X cannot be created with files: .*; set a\.kwargs"),
        (Sized, {"size": -1}, DataError, r"Sized\(\.\.\.\) failed with ValueError: negative"),
    ],
)
def test_a_class_that_cannot_be_created_is_refused(
    cls: type, own: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        created(cls, {"files": ["a"]}, own, what="a.name=X", own_key="a.kwargs")
