r"""Scores math answers by value with the library math-verify: 0.5 equals $\frac12$ and 2/4.

The library (Kydlíček, Hugging Face 2025) computes with the answer, which can take forever:
`9^{99999999}`. So it runs in worker processes, which end at a limit of CPU time (`workers`). The
library's own time limit uses signals, which cannot interrupt a long operation; it is disabled.

The library compares numbers to six decimals, so that all very small numbers are equal. Here they
must also agree relative to their size. Plain numbers are compared without the library.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from slipstream.errors import RewardError
from slipstream.rewards.scorers import number
from slipstream.rewards.scorers.boxed import last_boxed
from slipstream.rewards.scorers.truth import text_of
from slipstream.rewards.workers import TooMuchWorkError, WorkerPool

_COMPARES = "sympy_numeric_eq"
"""The library's function that compares two values numerically."""

_DECIMALS = 6
"""Decimals to which the library compares a number with decimals: 0.333333 equals 1/3."""

_RELATIVE = 1e-4
"""Largest difference of two equal numbers, relative to the larger one."""


@cache
def check_installed() -> None:
    """Raise RewardError if the library is missing. Does not import it."""
    if find_spec("math_verify") is None:
        raise _missing("there is no module math_verify")


@cache
def library() -> tuple[Callable[[str], list[Any]], Callable[[str], list[Any]], Callable[..., bool]]:
    """Return functions that parse a ground truth, parse a response, and compare the two.

    Raises RewardError if the library is missing, because no response can fix that.
    """
    try:
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
    except ImportError as error:
        raise _missing(str(error)) from error
    # The library warns about the disabled time limit.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    grader: Any = import_module("math_verify.grader")
    if not hasattr(grader, _COMPARES):
        raise RewardError(
            f"math_verify.grader has no {_COMPARES}, so this version of math-verify cannot compare "
            "small numbers; run: pip install math-verify==0.9.0"
        )
    if getattr(grader, _COMPARES).__module__ != __name__:
        setattr(grader, _COMPARES, _relative(getattr(grader, _COMPARES)))
    latex, plain = LatexExtractionConfig(), ExprExtractionConfig()

    def of_truth(text: str) -> list[Any]:
        found: list[Any] = parse(text, extraction_config=[latex], parsing_timeout=None)
        return found

    def of_response(text: str) -> list[Any]:
        found: list[Any] = parse(text, extraction_config=[plain, latex], parsing_timeout=None)
        return found

    return of_truth, of_response, verify


def _relative(equal: Callable[..., bool]) -> Callable[..., bool]:
    """Return the library's comparison of two values, which then also agree relative to their size.

    A matrix is compared by its elements, for which the library calls the returned function.
    """

    def alike(one: Any, other: Any, *settings: Any) -> bool:
        if not equal(one, other, *settings):
            return False
        try:
            return _near(one, other)
        except (AttributeError, TypeError, ValueError):
            return True  # not numbers: the library's own verdict counts

    return alike


def _near(one: Any, other: Any) -> bool:
    """Return whether two expressions, if they are numbers, differ by little relative to their size.

    Variables get fixed values.
    """
    from sympy import Rational

    if not hasattr(one, "free_symbols") or hasattr(one, "shape") or hasattr(other, "shape"):
        return True
    names = sorted(one.free_symbols | other.free_symbols, key=str)
    point = {name: Rational(7 + 2 * i, 5) for i, name in enumerate(names)}
    values = []
    for expression in (one, other):
        value = expression.subs(point).doit().evalf(30)
        if not value.is_number or not value.is_finite:
            return True
        # The precision of 1 bit is sympy's sign of a zero that it could not prove.
        zero = value == 0 or getattr(value, "_prec", 0) == 1
        values.append(0 * value if zero else value)
    difference = abs(values[0] - values[1])
    return bool(difference <= _RELATIVE * max(abs(values[0]), abs(values[1])))


def _missing(reason: str) -> RewardError:
    return RewardError(
        f"comparing math answers by value needs the package math-verify ({reason}); run: "
        "pip install 'slipstream-rl[math]'"
    )


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    timeout_score: float = 0.0,
) -> float:
    """Return 1.0 if the answer of the response has the value of the ground truth, else 0.0.

    The answer is the content of the last box, or if there is no box, it is parsed from the whole
    response. `50%` equals 50 and 0.5. An answer that takes too much time or memory gets
    `timeout_score`. Raises ValueError if the ground truth cannot be parsed, and RewardError if the
    library is missing.
    """
    truth = text_of(ground_truth, "math_verify", data_source)
    check_installed()
    # With several boxes, the library would require all of them to be correct.
    boxed = last_boxed(solution_str)
    answer = number.read(solution_str if boxed is None else boxed)
    expected = number.read(truth)
    if answer is not None and expected is not None:
        return float(_same_number(answer, expected))  # without a worker, and exact
    response = solution_str if boxed is None else rf"\boxed{{{_prepared(boxed)}}}"
    try:
        same = POOL.call(response, _prepared(truth))
    except TooMuchWorkError:
        return timeout_score
    if same is None:
        raise ValueError(
            f"math_verify: the ground truth {ground_truth!r} cannot be parsed as an answer "
            f"(data_source {data_source!r})"
        )
    return float(same)


def _prepared(text: str) -> str:
    """Return an answer in the notation that the library reads best."""
    if (read := number.read(text)) is not None:
        return read.latex
    return number.joined(number.folded(number.unwrapped(text)))


def _same_number(one: number.Number, other: number.Number) -> bool:
    """Return whether two numbers are equal, or a decimal is the other one rounded."""
    if number.equal(one, other, by_value=True):
        return True
    if (one.unit and other.unit and one.unit != other.unit) or (one.quotient and other.quotient):
        return False
    rounded = round(one.value, _DECIMALS) == round(other.value, _DECIMALS)
    size = max(abs(one.value), abs(other.value))
    return rounded and abs(one.value - other.value) <= Fraction(_RELATIVE) * size


def same_value(begin: Callable[[], None], response: str, truth: str) -> bool | None:
    """Return whether an answer has the value of the ground truth; None if the truth has no value.

    Called in a worker process, where the library is loaded once.
    """
    of_truth, of_response, verify = library()
    parsed = of_truth(rf"\boxed{{{truth}}}")
    if not parsed:
        return None
    begin()
    return bool(verify(parsed, of_response(response), timeout_seconds=None))


def prepare() -> None:
    """Load the library in a worker, and what it loads at the first comparison.

    Otherwise the limit of CPU time of the first answer would include that.
    """
    same_value(lambda: None, r"\boxed{\sqrt{4}x}", "2x")


POOL = WorkerPool(f"{__name__}:same_value", prepare=f"{__name__}:prepare")
"""Workers that compare math answers."""
