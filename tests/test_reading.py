"""Whatever reading a file raises becomes one refusal, and every value can be shown."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import CheckpointError, ConfigError, DataError
from slipstream.reading import MOST_DEPTH, reading, shown, special_file, value_problem


class PanicException(BaseException):
    """Has the name that Rust libraries use."""


def refusal(error: BaseException) -> str:
    with (
        pytest.raises(DataError) as caught,
        reading("a.json", DataError, "repair it", noun="file "),
    ):
        raise error
    assert caught.value.__cause__ is error
    return str(caught.value)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RecursionError("maximum"), "it is nested too deeply"),
        (MemoryError(), "it needs more memory than there is"),
        (KeyError("x"), "key 'x' is missing"),
        (OSError(36, "File name too long"), "File name too long"),
        (
            UnicodeDecodeError("utf-8", b"a\xff", 1, 2, "invalid"),
            "not UTF-8 text (invalid at byte 1)",
        ),
        (json.JSONDecodeError("Expecting", "{", 1), "invalid JSON at line 1, column 2: Expecting"),
        (OverflowError("too large\nmore"), "OverflowError: too large;"),
        (AssertionError(), "AssertionError;"),
        (PanicException("index out of range"), "PanicException: index out of range"),
        (ValueError("x" * 9000), "(9000 characters)"),
    ],
)
def test_every_error_names_file_reason_and_remedy(error: BaseException, reason: str) -> None:
    text = refusal(error)
    assert text.startswith("file a.json: ")
    assert text.endswith("; repair it")
    assert reason in text
    assert len(text) < 300


def test_an_integer_with_too_many_digits_is_named() -> None:
    match = "f: an integer has too many digits; x"
    with pytest.raises(DataError, match=match), reading("f", DataError, "x"):
        json.loads("9" * 5000)


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("mine"),
        CheckpointError("mine"),
        KeyboardInterrupt(),
        SystemExit(3),
        asyncio.CancelledError(),
        NameError("a mistake of the program"),
    ],
)
def test_refusals_requests_to_end_and_mistakes_pass_unchanged(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, reading("a", DataError, "b"):
        raise error
    assert caught.value is error


class Unwilling:
    def __repr__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"),
        ("a", "'a'"),
        (True, "True"),
        pytest.param(10**6000, "an integer of 19932 bits", id="huge"),
        (Unwilling(), "a Unwilling that cannot be shown"),
        ([10**6000], "a list that cannot be shown"),
        ("\ud800", "'\\ud800'"),
        ("a\0b", "'a\\x00b'"),
    ],
)
def test_every_value_can_be_shown(value: object, text: str) -> None:
    assert shown(value) == text
    assert len(shown([value] * 1000)) < 200


def nest(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": [value]}
    return value


@pytest.mark.parametrize(
    ("value", "in_setting", "in_data"),
    [
        (2**63 - 1, None, None),
        (2**63, "does not fit in 64 bits", None),
        (-(2**63) - 1, "does not fit in 64 bits", None),
        ({"a": [10**6000]}, "does not fit in 64 bits", "is too large"),
        ("\ud800", "lone surrogate", "lone surrogate"),
        ({"a\udc80": 1}, "lone surrogate", "lone surrogate"),
        ("a\0", "NUL", None),
        (nest(MOST_DEPTH // 2), None, None),
        (nest(MOST_DEPTH // 2 + 1), "nested deeper", "nested deeper"),
        (nest(5000), "nested deeper", "nested deeper"),
        ("日本語😀", None, None),
    ],
)
def test_values_that_nothing_can_hold(
    value: object, in_setting: str | None, in_data: str | None
) -> None:
    for problem, part in (
        (value_problem(value, setting=True), in_setting),
        (value_problem(value), in_data),
    ):
        assert (problem is None) == (part is None)
        assert part is None or (problem is not None and part in problem)


def test_a_link_to_a_device_is_a_special_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "nowhere").symlink_to("gone")
    assert special_file(tmp_path) is None
    (tmp_path / "zero").symlink_to("/dev/zero")
    assert special_file(tmp_path) == tmp_path / "zero"
