"""Checks answers of the countdown task: reach a target from given numbers with + and -.

Knows the syntax of answers. Does not know tokens, or how problems are generated. Called by the
reward functions and by `data.countdown`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

END_OF_TEXT = "<eos>"
"""End marker in the task's own vocabulary; text after it is ignored."""

_NO_WORDS = re.compile("<(?:pad|unk)>")
"""The other special tokens of the task's vocabulary, which are no part of an answer."""

_ANSWER = re.compile(r"(?<![\w<])answer(?![\w>])\s*:?", re.IGNORECASE)
# ASCII digits only: `\d` would also match digits of other scripts.
_TOKEN = re.compile(r"\s*([0-9]+|[+-])")
_MAX_DIGITS = 9
_MAX_TERMS = 64


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether an answer is correct, and the reason in a few words."""

    correct: bool
    reason: str


def _tokens(expression: str) -> list[str] | str:
    """Return the numbers and signs of `expression`, or an error text."""
    out: list[str] = []
    position = 0
    text = expression.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            return f"malformed answer: {text[position : position + 20].strip()!r}"
        token = match.group(1)
        if len(token) > _MAX_DIGITS:
            return f"malformed answer: a number of {len(token)} digits"
        out.append(token)
        if len(out) > 2 * _MAX_TERMS:
            return f"malformed answer: more than {_MAX_TERMS} terms"
        position = match.end()
    return out


def verify(numbers: Sequence[int], target: int, response_text: str) -> Verdict:
    """Check the last `answer <expression>` of a response.

    An expression is `number (+|-) number ...`, evaluated from left to right, without brackets or a
    leading sign. It is correct if it uses each entry of `numbers` at most once and no other
    number, and equals `target`. All text from the last word "answer" to the end (or to `<eos>`)
    must be the expression. Never raises for any text, and never evaluates text as code.
    """
    text = _NO_WORDS.sub("", response_text.split(END_OF_TEXT, 1)[0])
    answers = list(_ANSWER.finditer(text))
    if not answers:
        return Verdict(False, "no answer")
    tokens = _tokens(text[answers[-1].end() :])
    if isinstance(tokens, str):
        return Verdict(False, tokens)
    if not tokens:
        return Verdict(False, "empty answer")
    if len(tokens) % 2 == 0 or any(
        token.isdigit() == bool(place % 2) for place, token in enumerate(tokens)
    ):
        return Verdict(False, "malformed answer: numbers and signs must alternate")
    used = [int(token) for token in tokens[::2]]
    excess = Counter(used) - Counter(numbers)
    if excess:
        number = next(iter(excess))
        why = "used more often than given" if number in numbers else "not given"
        return Verdict(False, f"{number} is {why}")
    value = used[0]
    for sign, number in zip(tokens[1::2], used[1:], strict=True):
        value += number if sign == "+" else -number
    if value != target:
        return Verdict(False, f"equals {value}, not {target}")
    return Verdict(True, "correct")


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
) -> float:
    """Return 1.0 for a correct answer, else 0.0.

    `ground_truth` is `{"numbers": [...], "target": n}`. Raises ValueError if it has another form,
    which is an error in the data, not in the response.
    """
    try:
        numbers = [int(n) for n in ground_truth["numbers"]]
        target = int(ground_truth["target"])
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(
            "countdown ground truth must be {'numbers': [...], 'target': n}, got "
            f"{ground_truth!r} (data_source {data_source!r})"
        ) from error
    return 1.0 if verify(numbers, target, solution_str).correct else 0.0
