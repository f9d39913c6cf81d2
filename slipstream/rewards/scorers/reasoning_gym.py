"""Scores answers to reasoning-gym problems with the library's own rule for each generator.

Needs the extra `gym`. The answer is the content of the last `<answer>` tag.

Some rules of the library evaluate the answer as Python code (`eval`, sympy's `parse_expr`). An
answer could then run any code, or read the solution. Here `eval` only reads literals, `parse_expr`
only reads arithmetic, and the rules run in worker processes, which end at a limit of CPU time
(`workers`).
"""

from __future__ import annotations

import ast
import builtins
import keyword
import re
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from slipstream.errors import RewardError
from slipstream.rewards.workers import TooMuchWorkError, WorkerPool

PREFIX = "reasoning_gym/"
"""Prefix of the data sources, followed by the name of the generator."""


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return `score` from 0 to 1 (many generators give partial credit), and `acc`, 1 for score 1.

    `extra_info["reasoning_gym"]` is the problem (`question`, `answer`, `metadata`). The score is 0
    if the library cannot grade the answer, or needs too much time or memory for it. Raises
    ValueError without a problem, and RewardError if the library is missing or has no such
    generator.
    """
    entry = (extra_info or {}).get("reasoning_gym")
    if not isinstance(entry, Mapping):
        raise ValueError(
            "extra_info has no 'reasoning_gym' with the problem (question, answer, metadata)"
        )
    try:
        value, answer = POOL.call(data_source.removeprefix(PREFIX), solution_str, dict(entry))
    except TooMuchWorkError:
        value, answer = 0.0, None
    return {"score": value, "acc": float(value >= 1.0), "pred": "" if answer is None else answer}


def graded(
    begin: Callable[[], None], name: str, response: str, entry: dict[str, Any]
) -> tuple[float, str | None]:
    """Return score and answer of a response. Called in a worker process."""
    score, extract = _grader(name)
    begin()
    answer = extract(response)
    _ANSWER[:] = [answer]
    return float(score(answer, entry)), answer


def prepare() -> None:
    """Import the library in a worker, and replace what evaluates answers as code."""
    _library()
    import sympy

    parse = sympy.parse_expr
    sympy.parse_expr = _only_arithmetic(parse)
    for name, module in list(sys.modules.items()):
        if name.startswith("reasoning_gym."):
            space = vars(module)
            space["eval"] = _evaluated
            if space.get("parse_expr") is parse:
                space["parse_expr"] = sympy.parse_expr


_ANSWER: list[str | None] = []
"""The answer that is being graded."""


def _evaluated(text: str, *spaces: Any) -> Any:
    """Evaluate code of the library; of an answer, only a literal."""
    answer = _ANSWER[0] if _ANSWER else None
    if answer is not None and text.strip() in answer:
        return ast.literal_eval(text.strip())
    return builtins.eval(text, *spaces)


_TOKEN = re.compile(
    r"\s*(?:(?P<name>[A-Za-z][A-Za-z0-9]*)|[0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?|\.[0-9]+"
    r"|\*\*|[-+*/^(),])"
)
_FUNCTIONS = frozenset(
    (
        *("exp", "log", "ln", "sqrt", "sin", "cos", "tan", "cot", "sec", "csc"),
        *("asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
        *("Abs", "pi", "E"),
    )
)


def _only_arithmetic(parse: Callable[..., Any]) -> Callable[..., Any]:
    def parsed(text: str, *rest: Any, **more: Any) -> Any:
        if not is_arithmetic(text):
            raise ValueError("the answer is not an arithmetic expression")
        return parse(text, *rest, **more)

    return parsed


def is_arithmetic(text: str) -> bool:
    """Return whether a text only has numbers, operators, variables and common functions."""
    import sympy

    position, text = 0, text.rstrip()
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None:
            return False
        name = token["name"]
        # parse_expr evaluates all other names as variables.
        if name is not None and name not in _FUNCTIONS:
            known = hasattr(builtins, name) or keyword.iskeyword(name)
            if known or (len(name) > 1 and hasattr(sympy, name)):
                return False
        position = token.end()
    return True


POOL = WorkerPool(f"{__name__}:graded", prepare=f"{__name__}:prepare")
"""Workers that grade answers."""


@cache
def _library() -> Any:
    try:
        import reasoning_gym
        import reasoning_gym.utils
    except ImportError as error:
        raise RewardError(
            f"data_source {PREFIX}* needs the library reasoning-gym ({error}); install it with: "
            "pip install 'slipstream-rl[gym]'"
        ) from error
    return reasoning_gym


@cache
def _grader(name: str) -> tuple[Callable[..., float], Callable[[str], str | None]]:
    library = _library()
    try:
        return library.get_score_answer_fn(name), library.utils.extract_answer
    except ValueError as error:
        raise RewardError(f"reasoning-gym has no generator {name!r}") from error
