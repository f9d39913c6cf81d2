r"""Scores math problems whose answer follows "Answer:" (DAPO, Yu et al. 2025; AIME).

Answers are normalized by the rules of Minerva (Lewkowycz et al. 2022, appendix D.1): words, units,
and commas within numbers are removed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from slipstream.rewards.scorers.boxed import last_boxed
from slipstream.rewards.scorers.truth import text_of

_TAIL, _BOX_TAIL = 300, 100
"""Characters at the end of a response that are searched for an answer, and for a box."""

NO_ANSWER = "[INVALID]"

_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)

_SPELLINGS = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    (r"\$", ""),
    (r"\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (r",\text{and}", ","),
    (r"\text{and}", ","),
    (r"\text{m}", r"\text{}"),
)
"""Replacements, applied in this order."""

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

_FORMULA = re.compile(r"\$(.*?)\$", re.DOTALL)
_WRAPPED = [re.compile(rf"\\{name}\{{(.*?)\}}") for name in ("text", "textbf", "overline")]
_BOXED = re.compile(r"\\boxed\{(.*)\}")
_BARE_FRACTION = re.compile(r"frac([^{])(.)")
_BARE_ROOT = re.compile(r"sqrt([^{])")


def normalised(answer: str) -> str:
    """Return the normal form of an answer."""
    text = answer.rsplit("=", 1)[-1]
    for old, new in _SPELLINGS:
        text = text.replace(old, new)
    for unwanted in _LEAVE_OUT:
        text = text.replace(unwanted, "")
    if formula := _FORMULA.search(text):
        text = formula[1]
    for wrapped in _WRAPPED:
        text = wrapped.sub(r"\1", text)
    text = _BOXED.sub(r"\1", text)
    text = _BARE_FRACTION.sub(r"frac{\1}{\2}", text)
    text = _BARE_ROOT.sub(r"sqrt{\1}", text).replace("$", "")
    without = text.replace(",", "")
    return (without if without.isdigit() else text).strip()


def extract_answer(solution_str: str) -> str:
    """Return the normalized text after the last "Answer:", else the content of the last box.

    Returns `NO_ANSWER` if there is neither.
    """
    found = _ANSWER.findall(solution_str[-_TAIL:])
    if found:
        return normalised(found[-1])
    boxed = last_boxed(solution_str[-_BOX_TAIL:])
    return NO_ANSWER if boxed is None else normalised(boxed)


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
    pred = extract_answer(solution_str)
    right = pred == normalised(truth)
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": pred}
