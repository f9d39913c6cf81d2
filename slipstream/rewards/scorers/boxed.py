r"""The answer that a response puts into a box: `\boxed{...}`, `\boxed x` or `\fbox{...}`.

Used by the scorers of mathematics.
"""

from __future__ import annotations

_COMMANDS = (r"\boxed", r"\fbox")


def last_boxed(text: str) -> str | None:
    r"""What is in the last box, braces in it and all, or None where there is no box or the last one
    has no end.

    `\boxed` with a space takes what follows up to the next `$` or the end of the line. Reads the
    text once, however long it is.
    """
    start, command = max((text.rfind(command), command) for command in _COMMANDS)
    if start < 0:
        return None
    begin = start + len(command)
    if text.startswith("{", begin):
        end = _closing(text, begin)
        return None if end is None else text[begin + 1 : end]
    if text.startswith(" ", begin):
        line = text[begin:].split("\n", 1)[0]
        return line.split("$", 1)[0].strip() or None
    return None


def _closing(text: str, opening: int) -> int | None:
    """Where the brace that opens there is closed."""
    depth = 0
    for i in range(opening, len(text)):
        if text[i] == "{":
            depth += 1
        elif text[i] == "}":
            depth -= 1
            if not depth:
                return i
    return None
