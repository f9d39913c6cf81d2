"""Tables that read well anywhere: on a narrow terminal, in a pipe, without colours, in ASCII.

Plain text in columns; where the last column would become too narrow, its text goes under the row.
Knows nothing of what is in them. Called by `preflight.doctor`.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TextIO

from rich.text import Text

from slipstream.metrics.progress import SteadyConsole

GAP = "  "
_LEAST = 24
"""Characters that the last column needs to stand beside the others."""
_UNDER = 4
"""Spaces before what goes under its row."""


def laid_out(rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    """Rows of equally many cells as lines of at most `width` characters, except for single words
    that are longer."""
    if not rows:
        return
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    first = sum(widths[:-1]) + len(GAP) * (len(widths) - 1)
    beside = width - first >= min(_LEAST, widths[-1])
    for row in rows:
        cells = [cell.ljust(size) for cell, size in zip(row, widths, strict=True)]
        head, last = GAP.join(cells[:-1]), row[-1]
        if beside:
            parts = _wrapped(last, width - first) or [""]
            yield (f"{head}{GAP}{parts[0]}" if head else parts[0]).rstrip()
            yield from (" " * first + part for part in parts[1:])
            continue
        own = head.rstrip()
        yield from [own] if len(own) <= width else _wrapped(" ".join(row[:-1]), width)
        yield from (" " * _UNDER + part for part in _wrapped(last.strip(), width - _UNDER))


def _wrapped(text: str, width: int) -> list[str]:
    # Paths and commands are copied: never broken in the middle.
    return textwrap.wrap(text, max(width, 1), break_long_words=False, break_on_hyphens=False)


class Page:
    """What a command prints: lines and tables, on `file` (default: standard output)."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._console = SteadyConsole(file=file or sys.stdout, highlight=False)

    @property
    def width(self) -> int:
        return self._console.width

    def line(self, text: str = "", *, style: str = "") -> None:
        """A line that may be wrapped between words."""
        for part in _wrapped(text, self.width) or [""]:
            self.raw(part, style=style)

    def raw(self, text: str, *, style: str = "") -> None:
        """Text as it is, however long."""
        encoding = getattr(self._console.file, "encoding", None) or "utf-8"
        shown = text.encode(encoding, "backslashreplace").decode(encoding)
        self._console.print(Text(shown, style=style), soft_wrap=True)

    def title(self, text: str) -> None:
        self.raw("")
        self.line(text, style="bold")

    def table(
        self,
        rows: Sequence[Sequence[str]],
        *,
        styles: Mapping[str, str] | None = None,
    ) -> None:
        """Rows under one another; `styles` are of lines that begin with a word."""
        for line in laid_out(rows, self.width):
            first = line.partition(" ")[0]
            self.raw(line, style=(styles or {}).get(first, ""))
