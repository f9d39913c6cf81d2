r"""Answers in LaTeX, written in one way: `\dfrac12`, `1/2` and `0.5` are all `\frac{1}{2}`.

The rules are those of the MATH data set (Hendrycks et al. 2021): text is compared with text, and
nothing is computed. Used by the scorers of mathematics.
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
"""In this order."""

_UNIT = r"\text{ "
"""What a unit begins with, where there is one of them: it and what follows are left out."""

_BARE_POINT = re.compile(r"(^|[ {])\.")

_SHORT_NAME = re.compile(r"^([^=]{0,2})=([^=]*)$")
"""`x = 5`, `f = 5`: a name of at most two characters."""

_BARE_ROOT = re.compile(r"\\sqrt(?=[^{])(.)", re.DOTALL)

_WHOLE_FRACTION = re.compile(r"^(-?[0-9]+)/(-?[0-9]+)$")


def normalised(answer: str) -> str:
    """One way to write an answer; equal answers may still differ, unequal ones do."""
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
    """Whether two answers are written alike, once normalised."""
    return normalised(one) == normalised(other)


def _braced_fractions(text: str) -> str:
    r"""`\frac12` and `\frac1{72}` with all their braces; left as it is where a part is missing."""
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
