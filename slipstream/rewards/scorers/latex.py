r"""Normalizes answers in LaTeX: `\dfrac12`, `1/2` and `0.5` all become `\frac{1}{2}`.

The rules are those of the MATH data set (Hendrycks et al. 2021). They only compare text and compute
nothing. Used by the math scorers.
"""

from __future__ import annotations

import re

_SPELLINGS = (
    ("\n", ""),
    (r"\!", ""),
    ("\\\\", "\\"),
    ("tfrac", "frac"),
    ("dfrac", "frac"),
    *((unwanted, "") for unwanted in (r"\left", r"\right", r"^{\circ}", r"^\circ")),
    *((unwanted, "") for unwanted in (r"\$", r"\%", "%")),
)
"""Replacements, applied in this order."""

_UNIT = r"\text{ "
"""Start of a unit. If it occurs exactly once, it and the text after it are removed."""

_BARE_POINT = re.compile(r"(^|[ {])\.")

_SHORT_NAME = re.compile(r"^([^=]{0,2})=([^=]*)$")
"""`x = 5`, `f = 5`: a name of at most two characters."""

_BARE_ROOT = re.compile(r"\\sqrt(?=[^{])(.)", re.DOTALL)

_WHOLE_FRACTION = re.compile(r"^(-?[0-9]+)/(-?[0-9]+)$")


def normalised(answer: str) -> str:
    """Return the normal form of an answer. Equal answers may still have different forms."""
    text = answer
    for old, new in _SPELLINGS:
        text = text.replace(old, new)
    if text.count(_UNIT) == 1:
        text = text.partition(_UNIT)[0]
    text = _BARE_POINT.sub(r"\g<1>0.", text)
    if name := _SHORT_NAME.match(text):
        text = name[2]
    text = _braced_fractions(_BARE_ROOT.sub(r"\\sqrt{\1}", text.replace(" ", "")))
    if text == "0.5":
        return r"\frac{1}{2}"
    if whole := _WHOLE_FRACTION.match(text):
        return rf"\frac{{{whole[1]}}}{{{whole[2]}}}"
    return text


def same(one: str, other: str) -> bool:
    """Return whether two answers have the same normal form."""
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
