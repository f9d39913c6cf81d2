r"""Finds LaTeX boxes in a text, with the command, as `\boxed{42}`.

`slipstream.rewards.scorers.boxed` returns the contents alone, by the rules of our own scorers.
"""

from __future__ import annotations

BOXED, FBOX = r"\boxed", r"\fbox"


def braced(text: str, start: int) -> str | None:
    """Return the text from `start` to the brace that closes the first opened one.

    None if there is no such brace.
    """
    depth = 0
    for place in range(start, len(text)):
        if text[place] == "{":
            depth += 1
        elif text[place] == "}":
            depth -= 1
            if depth == 0:
                return text[start : place + 1]
    return None


def unwrapped(text: str, command: str) -> str:
    """Return the content of a box. Raises AssertionError, as verl does, if the text is no box."""
    start = command + "{"
    if not (text.startswith(start) and text.endswith("}")):
        raise AssertionError(f"expected {start}...}}, got {text!r}")
    return text[len(start) : -1]
