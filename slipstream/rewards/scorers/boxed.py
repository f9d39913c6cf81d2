r"""Extracts the boxed answer of a response: `\boxed{...}`, `\boxed x` or `\fbox{...}`.

Used by the math scorers.
"""

from __future__ import annotations

from slipstream.rewards.scorers.number import closing_brace

_COMMANDS = (r"\boxed", r"\fbox")


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last box, including inner braces.

    None if there is no box, or if the last box is not closed. White space may separate the command
    and the brace. After `\boxed` and a space without a brace, the answer is the text up to the next
    `$` or the end of the line. Runs in linear time.
    """
    start, command = max((text.rfind(command), command) for command in _COMMANDS)
    if start < 0:
        return None
    begin = start + len(command)
    brace = begin
    while brace < len(text) and text[brace].isspace():
        brace += 1
    if text.startswith("{", brace):
        end = closing_brace(text, brace)
        return None if end is None else text[brace + 1 : end]
    if text.startswith(" ", begin):
        line = text[begin:].split("\n", 1)[0]
        return line.split("$", 1)[0].strip() or None
    return None
