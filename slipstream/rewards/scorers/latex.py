r"""Normalizes answers in LaTeX: `\dfrac12`, `1/2` and `0.5` all become `\frac{1}{2}`.

The rules are those of the MATH data set (Hendrycks et al. 2021). They compare text, except
that plain numbers are compared by value. Used by the math scorers.
"""

from __future__ import annotations

import re

from slipstream.rewards.scorers import number

_SPELLINGS = (
    ("\n", ""),
    (r"\!", ""),
    ("\\\\", "\\"),
    ("tfrac", "frac"),
    ("dfrac", "frac"),
    ("cfrac", "frac"),
    *((unwanted, "") for unwanted in (r"\left", r"\right", r"^{\circ}", r"^\circ", "°")),
    *((unwanted, "") for unwanted in (r"\$", r"\%", "%")),
)
"""Replacements, applied in this order."""

_UNIT = r"\text{ "
"""Start of a unit. If it occurs exactly once, it and the text after it are removed."""

_BARE_POINT = re.compile(r"(^|[ {])\.")

_SHORT_NAME = re.compile(r"^([^=]{0,2})=([^=]*)$")
"""`x = 5`, `f = 5`: a name of at most two characters."""

_BARE_ROOT = re.compile(r"\\sqrt(?=[^{])(.)", re.DOTALL)

_THIN_SPACE = re.compile(r"(?<!\\)\\[,;:]|~")
"""Spaces of LaTeX that separate thousands, or a number and its unit."""

_SPACE = re.compile(r"(?<![0-9.])\s+|\s+(?![0-9.])")
"""White space, but not between two numbers: `1 2` is not 12."""

_SHORT_FRACTION = re.compile(r"(\\frac)\s*([0-9])\s+([0-9])")

_WHOLE_FRACTION = re.compile(r"^(-?[0-9]+)/(-?[0-9]+)$")


def normalised(answer: str) -> str:
    """Return the normal form of an answer. Equal answers may still have different forms."""
    text = _THIN_SPACE.sub(" ", number.joined(number.folded(number.unwrapped(answer))))
    for old, new in _SPELLINGS:
        text = text.replace(old, new)
    if text.count(_UNIT) == 1:
        text = text.partition(_UNIT)[0]
    text = _BARE_POINT.sub(r"\g<1>0.", text)
    if name := _SHORT_NAME.match(text):
        text = name[2]
    text = _SHORT_FRACTION.sub(r"\1\2\3", text.strip())
    text = _braced_fractions(_BARE_ROOT.sub(r"\\sqrt{\1}", _SPACE.sub("", text)))
    if text == "0.5":
        return r"\frac{1}{2}"
    if whole := _WHOLE_FRACTION.match(text):
        return rf"\frac{{{whole[1]}}}{{{whole[2]}}}"
    return text


def same(one: str, other: str) -> bool:
    """Return whether two answers have the same normal form, or are equal numbers.

    Numbers are compared as in `number.equal`: a decimal may equal a fraction, but not two different
    fractions.
    """
    a, b = number.read(one), number.read(other)
    if a is not None and b is not None:
        return number.equal(a, b)
    return normalised(one) == normalised(other)


def _braced_fractions(text: str) -> str:
    r"""Add missing braces to `\frac12` and `\frac1{72}`; unchanged if an argument is missing."""
    first, *parts = text.split(r"\frac")
    found = [first]
    for part in parts:
        found.append(r"\frac")
        if part.startswith("{"):
            found.append(part)
        elif len(part) < 2:
            return text
        elif part[1] == "{":
            found.append(f"{{{part[0]}}}{part[1:]}")
        else:
            found.append(f"{{{part[0]}}}{{{part[1]}}}{part[2:]}")
    return "".join(found)
