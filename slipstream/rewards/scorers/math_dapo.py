r"""Scores math problems whose answer follows "Answer:" (DAPO, Yu et al. 2025; AIME).

Answers are normalized by the rules of Minerva (Lewkowycz et al. 2022, appendix D.1): words, units,
and thousands separators are removed. Plain numbers are compared by value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from slipstream.rewards.scorers import number
from slipstream.rewards.scorers.boxed import last_boxed
from slipstream.rewards.scorers.truth import text_of

_TAIL, _BOX_TAIL = 300, 100
"""Characters at the end of a response that are searched for an answer, and for a box."""

NO_ANSWER = "[INVALID]"

_DISPLAY = r"\$\$(?:(?!\$\$).)*\$\$|\\\[(?:(?!\\\]).)*\\\]"
_ANSWER = re.compile(
    rf"answer\s*(?:\*\*)?\s*:\s*((?:{_DISPLAY})(?=[ \t.]*(?:\n|\Z))|[^\n]+)",
    re.IGNORECASE | re.DOTALL,
)
"""The marker, and the answer: display math, which may have several lines, or else one line."""

_ARTICLES = (("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""))
"""Replacements before spaces are removed, applied in this order."""

_SPELLINGS = (
    ("mbox", "text"),
    (r",\text{and}", ","),
    (r"\text{and}", ","),
    (r"\text{m}", r"\text{}"),
)
"""Replacements after spaces are removed, applied in this order."""

_UNITS = [
    "square",
    "ways",
    "integers",
    "dollars",
    "mph",
    "inches",
    "ft",
    "hours",
    "km",
    "units",
    "points",
    "feet",
    "minutes",
    "digits",
    "cents",
    "degrees",
    "cm",
    "gm",
    "pounds",
    "meters",
    "meals",
    "edges",
    "students",
    "childrentickets",
    "multiples",
]

_LEAVE_OUT = (
    *_UNITS,
    *("\\ldots", "sue", r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3"),
    *("\\text{\n}", r"\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}"),
    *('"', r"\dots"),
)
"""Texts to remove, in this order."""

_SPACE = re.compile(r"(?<![0-9])(?:\\? )+|(?:\\? )+(?![0-9])")
"""Spaces, but not between two digits: `1 2` is not 12."""

_THOUSANDS = re.compile(r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,2}(?:,[0-9]{2})+,[0-9]{3})")
_FORMULA = re.compile(r"\$(.*?)\$", re.DOTALL)
_WRAPPED = [re.compile(rf"\\{name}\{{(.*?)\}}") for name in ("text", "textbf", "overline")]
_BOXED = re.compile(r"\\boxed\{(.*)\}")
_BARE_FRACTION = re.compile(r"frac([^{])(.)")
_BARE_ROOT = re.compile(r"sqrt([^{])")


def normalised(answer: str) -> str:
    """Return the normal form of an answer. That of a number is the shortest decimal."""
    text = answer.rsplit("=", 1)[-1]
    if (read := number.read(text)) is not None:
        return read.latex
    text = number.joined(number.folded(number.unwrapped(text)))
    for old, new in _ARTICLES:
        text = text.replace(old, new)
    text = _SPACE.sub("", text)
    for old, new in _SPELLINGS:
        text = text.replace(old, new)
    for unwanted in _LEAVE_OUT:
        text = text.replace(unwanted, "")
    formulas = _FORMULA.findall(text)
    # A second formula may be the power of a unit, `cm$^3$`, but not a second answer.
    if formulas and not any(re.match(r"[^^]*[0-9]", more) for more in formulas[1:]):
        text = formulas[0]
    for wrapped in _WRAPPED:
        text = wrapped.sub(r"\1", text)
    text = _BOXED.sub(r"\1", text)
    text = _BARE_FRACTION.sub(r"frac{\1}{\2}", text)
    text = _BARE_ROOT.sub(r"sqrt{\1}", text).replace("$", "").strip()
    return text.replace(",", "") if _THOUSANDS.fullmatch(text) else text


def extract_answer(solution_str: str) -> str:
    """Return the normalized text after the last "Answer:", else the content of the last box.

    Returns `NO_ANSWER` if there is neither.
    """
    answer = _answer(solution_str)
    return NO_ANSWER if answer is None else normalised(answer)


def _answer(solution_str: str) -> str | None:
    found = _ANSWER.findall(solution_str[-_TAIL:])
    return str(found[-1]).strip("* ") if found else last_boxed(solution_str[-_BOX_TAIL:])


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return `score` (1.0 if correct, else -1.0), `acc` (whether correct) and `pred` (the answer).

    Raises ValueError if there is no ground truth.
    """
    truth = text_of(ground_truth, "math_dapo", data_source)
    answer = _answer(solution_str)
    right = answer is not None and _same(answer, truth)
    pred = NO_ANSWER if answer is None else normalised(answer)
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": pred}


def _same(answer: str, truth: str) -> bool:
    one, other = (number.read(text.rsplit("=", 1)[-1]) for text in (answer, truth))
    if one is not None and other is not None:
        return number.equal(one, other)
    return normalised(answer) == normalised(truth)
