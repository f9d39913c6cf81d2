"""What documentation is made of: its files, and the commands that stand in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LOG = DOCS / "log"
"""Dated measurements: their commands are not checked against today's program."""
PROGRAMS = r"(?:slipstream|python -m (?:pdb .*-m )?slipstream\.\w+|make)\s"
VARIABLES = r"(?:[A-Z_]+=\S+ )+"
"""Of the environment, before a command."""
PLACE = re.compile(r"<|key=value|\.\.\.|\b[A-Z]{2,}\b(?!=)|=[A-Z]+\b")
"""What the reader is to fill in."""


def markdown() -> list[Path]:
    """All Markdown of the repository that people read: docs/, and the files beside the code."""
    beside = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "bench/README.md")]
    examples = (ROOT / "examples").rglob("*.md")
    pages = [path for path in DOCS.rglob("*.md") if "_build" not in path.parts]
    return sorted({*beside, *examples, *pages})


@dataclass(frozen=True, slots=True)
class Shown:
    """A command as a page shows it; `words` as a shell would split it, without comments."""

    page: Path
    line: int
    words: tuple[str, ...]


def commands(page: Path) -> Iterator[Shown]:
    """The commands of a page's code blocks."""
    return commands_in(page.read_text(encoding="utf-8"), page)


def sentences(page: Path) -> Iterator[Shown]:
    """The whole commands that stand in a page's sentences: with settings or flags, and with nothing
    that is left to the reader."""
    text = re.sub(r"```.*?```", blank, page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for found in re.finditer(r"`([^`]+)`", text):
        command = " ".join(found[1].split())
        whole = command.startswith("make ") or "=" in command or " --" in command
        if re.match(PROGRAMS, command) and whole and not PLACE.search(command):
            yield Shown(page, text.count("\n", 0, found.start()) + 1, tuple(shlex.split(command)))


def blank(block: re.Match[str]) -> str:
    """As many lines without anything."""
    return "\n" * block[0].count("\n")


def commands_in(text: str, page: Path) -> Iterator[Shown]:
    """The commands of code blocks, indented or fenced, continuation lines joined."""
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
        # As CONTRIBUTING has them: what follows two spaces is said of the command.
        said = re.split(r"\s{2,}(?=[.a-z])", text.strip(), maxsplit=1)
        shown = said[0] if said[0].startswith("make ") else text
        yield Shown(page, begun, tuple(shlex.split(shown, comments=True)))
