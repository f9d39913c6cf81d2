r"""Extracts the boxed answer of a response: `\boxed{...}`, `\boxed x` or `\fbox{...}`.

Used by the math scorers.
"""

from __future__ import annotations

_COMMANDS = (r"\boxed", r"\fbox")


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last box, including inner braces.

    None if there is no box, or if the last box is not closed. After `\boxed` and a space the answer
    is the text up to the next `$` or the end of the line. Runs in linear time.
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
    """Return the position of the brace that closes the one at `opening`."""
    depth = 0
    for i in range(opening, len(text)):
        if text[i] == "{":
            depth += 1
        elif text[i] == "}":
            depth -= 1
            if not depth:
                return i
    return None
