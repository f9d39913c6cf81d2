"""Prints text tables for narrow terminals, pipes, and output without color or in ASCII.

Tables are plain text in columns. If the last column would be too narrow, its text is printed below
its row. Called by `preflight.doctor`.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TextIO

from rich.text import Text

from slipstream.metrics.progress import SteadyConsole

GAP = "  "
_MIN_LAST = 24
"""Minimum width in characters of a last column that is printed next to the others."""
_INDENT = 4
"""Indentation in spaces of last-column text that is printed below its row."""


def format_table(rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    """Yield rows with equal numbers of cells as lines of at most `width` characters.

    Only a single word that is longer than `width` exceeds it.
    """
    if not rows:
        return
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    first = sum(widths[:-1]) + len(GAP) * (len(widths) - 1)
    side_by_side = width - first >= min(_MIN_LAST, widths[-1])
    for row in rows:
        cells = [cell.ljust(size) for cell, size in zip(row, widths, strict=True)]
        head, last = GAP.join(cells[:-1]), row[-1]
        if side_by_side:
            parts = _wrapped(last, width - first) or [""]
            yield (f"{head}{GAP}{parts[0]}" if head else parts[0]).rstrip()
            yield from (" " * first + part for part in parts[1:])
            continue
        own = head.rstrip()
        yield from [own] if len(own) <= width else _wrapped(" ".join(row[:-1]), width)
        yield from (" " * _INDENT + part for part in _wrapped(last.strip(), width - _INDENT))


def _wrapped(text: str, width: int) -> list[str]:
    # Paths and commands stay whole, so that users can copy them.
    return textwrap.wrap(text, max(width, 1), break_long_words=False, break_on_hyphens=False)


class Page:
    """Prints lines and tables of a command to `file` (default: standard output)."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._console = SteadyConsole(file=file or sys.stdout, highlight=False)

    @property
    def width(self) -> int:
        return self._console.width

    def line(self, text: str = "", *, style: str = "") -> None:
        """Print a line, wrapped between words if it is too long."""
        for part in _wrapped(text, self.width) or [""]:
            self.raw(part, style=style)

    def raw(self, text: str, *, style: str = "") -> None:
        """Print text without wrapping it."""
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
        """Print rows in columns. `styles` maps the first word of a line to its style."""
        for line in format_table(rows, self.width):
            first = line.partition(" ")[0]
            self.raw(line, style=(styles or {}).get(first, ""))
