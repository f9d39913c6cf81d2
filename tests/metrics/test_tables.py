"""Text tables on wide and narrow terminals, in pipes, and in ASCII."""

from __future__ import annotations

import io

import pytest

from slipstream.metrics.tables import Page, format_table

ROWS = [("ok", "torch", "2.13.0 (needs >=2.9)"), ("problem", "numba", "not installed at all")]


def test_columns_are_as_wide_as_their_longest_cell() -> None:
    assert list(format_table(ROWS, 80)) == [
        "ok       torch  2.13.0 (needs >=2.9)",
        "problem  numba  not installed at all",
    ]


def test_the_last_column_wraps_next_to_the_others() -> None:
    rows = [("ok", "cores", "two of two, which is all that this machine has to offer")]
    assert list(format_table(rows, 40)) == [
        "ok  cores  two of two, which is all that",
        "           this machine has to offer",
    ]


def test_a_narrow_last_column_is_printed_below_its_row() -> None:
    rows = [("a name of some length", "1,234", "and what that is, in many words"), ("x", "5", "")]
    assert list(format_table(rows, 40)) == [
        "a name of some length  1,234",
        "    and what that is, in many words",
        "x                      5",
    ]


@pytest.mark.parametrize("width", [20, 40, 79, 200])
def test_no_line_exceeds_the_width(width: int) -> None:
    words = [("word " * count, "x" * 9, "other " * count) for count in (1, 5, 20)]
    lines = list(format_table(words, width))
    assert max(map(len, lines)) <= width
    assert " ".join(" ".join(lines).split()).count("other") == 26


def test_no_rows_give_no_lines() -> None:
    assert list(format_table([], 80)) == []


def page(encoding: str = "utf-8") -> tuple[Page, io.BytesIO]:
    raw = io.BytesIO()
    return Page(io.TextIOWrapper(raw, encoding=encoding, write_through=True)), raw


def test_a_pipe_gets_no_escape_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    shown, raw = page()
    shown.title("versions")
    shown.table(ROWS, styles={"problem": "bold red"})
    assert b"\x1b" not in raw.getvalue()
    assert raw.getvalue().decode().splitlines()[:2] == ["", "versions"]
    assert shown.width == 80


def test_colors_are_used_on_terminals_without_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    for no_colour, expected in (("", True), ("1", False)):
        monkeypatch.setenv("NO_COLOR", no_colour)
        raw = io.BytesIO()
        shown = Page(Terminal(raw, encoding="utf-8", write_through=True))
        shown.table(ROWS, styles={"problem": "red"})
        assert (b"\x1b[31m" in raw.getvalue()) == expected


def test_the_width_comes_from_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    shown, raw = page()
    shown.line("word " * 20)
    assert shown.width == 40
    assert max(map(len, raw.getvalue().decode().splitlines())) <= 40


def test_characters_outside_the_encoding_are_escaped() -> None:
    shown, raw = page("ascii")
    shown.raw("runs/Über")
    assert raw.getvalue() == b"runs/\\xdcber\n"


def test_a_broken_pipe_raises_nothing() -> None:
    class ClosedStream(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    shown = Page(ClosedStream())
    shown.line("nobody reads this")
    shown.line("nor this")
