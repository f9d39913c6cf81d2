"""The files of the documentation, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LOG = DOCS / "log"
"""Dated measurements; their commands are not checked against the current program."""
PROGRAMS = r"(?:slipstream|python -m (?:pdb .*-m )?slipstream\.\w+|make)\s"
VARIABLES = r"(?:[A-Z_]+=\S+ )+"
"""Environment variables before a command."""
PLACE = re.compile(r"<|key=value|\.\.\.|\b[A-Z]{2,}\b(?!=)|=[A-Z]+\b")
"""Placeholders that the reader must replace."""


def markdown() -> list[Path]:
    """All Markdown pages for readers: docs/, examples/, and those next to the code."""
    beside = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "bench/README.md")]
    examples = (ROOT / "examples").rglob("*.md")
    pages = [path for path in DOCS.rglob("*.md") if "_build" not in path.parts]
    return sorted({*beside, *examples, *pages})


@dataclass(frozen=True, slots=True)
class Shown:
    """A command on a page. `words` are the words of a shell, without comments."""

    page: Path
    line: int
    words: tuple[str, ...]


def commands(page: Path) -> Iterator[Shown]:
    """Yield the commands in the code blocks of a page."""
    return commands_in(page.read_text(encoding="utf-8"), page)


def sentences(page: Path) -> Iterator[Shown]:
    """Yield the complete commands in the sentences of a page: with settings or flags, and without
    placeholders."""
    text = re.sub(r"```.*?```", blank, page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for found in re.finditer(r"`([^`]+)`", text):
        command = " ".join(found[1].split())
        whole = command.startswith("make ") or "=" in command or " --" in command
        if re.match(PROGRAMS, command) and whole and not PLACE.search(command):
            yield Shown(page, text.count("\n", 0, found.start()) + 1, tuple(shlex.split(command)))


def blank(block: re.Match[str]) -> str:
    """Replace a block by the same number of empty lines."""
    return "\n" * block[0].count("\n")


def commands_in(text: str, page: Path) -> Iterator[Shown]:
    """Yield the commands in indented or fenced code blocks, with continuation lines joined."""
    number, lines = 0, text.splitlines()
    fenced = False
    while number < len(lines):
        begun, text = number + 1, lines[number]
        number += 1
        text = re.sub(rf"^(\s*){VARIABLES}(?={PROGRAMS})", r"\1", text)
        fenced ^= text.lstrip().startswith("```")
        if not (fenced or text.startswith("    ")) or not re.match(PROGRAMS, text.lstrip()):
            continue
        while text.endswith("\\"):
            text = text[:-1] + " " + lines[number].strip()
            number += 1
        # In CONTRIBUTING.md, two spaces separate a command from its description.
        said = re.split(r"\s{2,}(?=[.a-z])", text.strip(), maxsplit=1)
        shown = said[0] if said[0].startswith("make ") else text
        yield Shown(page, begun, tuple(shlex.split(shown, comments=True)))
