"""Compares what a program printed or returned with the expected text or value.

Binary rounding errors do not count: 0.30000000000000004 equals 0.3. With a tolerance, numbers with
decimals are compared by value. Used by the code scorer.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

ROUNDING = 1e-12
"""Largest difference of two numbers that counts as a rounding error, relative to the expected
number; absolute if that is 0."""

_DIGITS = range(15, 18)
"""Significant digits of a printed number that may have a rounding error. More digits were not
computed with floating-point numbers, so that they are compared exactly."""

# Each digit matches in one way only, so that a long text takes linear time.
_NUMBER = re.compile(
    r"(?<![\w.])([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)(?!\w|\.[0-9])"
)


def is_tolerance(value: Any) -> bool:
    """Return whether a value is a tolerance: a finite number of 0 or more."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 <= value < math.inf


def same_text(stdout: str, expected: str, tolerance: float | None = None) -> bool:
    """Compare line by line, ignoring white space at the ends of lines and of the text.

    Without `tolerance`, a number with decimals may differ by a rounding error, if it or the
    expected one has 15 to 17 digits, and neither has more. With a tolerance above 0, numbers with
    decimals are compared by value, and may differ by that share of the expected number. 0 compares
    only texts.
    """
    got, wanted = _trimmed(stdout), _trimmed(expected)
    if got == wanted:
        return True
    if tolerance == 0 or len(got) != len(wanted):
        return False
    return all(a == b or _same_line(a, b, tolerance) for a, b in zip(got, wanted, strict=True))


def _trimmed(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _same_line(got: str, wanted: str, tolerance: float | None) -> bool:
    """Compare two lines whose text outside of numbers must be equal."""
    parts, others = _NUMBER.split(got), _NUMBER.split(wanted)
    if parts[::2] != others[::2]:
        return False
    return all(
        a == b or _same_number(a, b, tolerance)
        for a, b in zip(parts[1::2], others[1::2], strict=True)
    )


def _same_number(got: str, wanted: str, tolerance: float | None) -> bool:
    """Compare two numbers in text form, of which at least one must have decimals."""
    one, other = float(got), float(wanted)
    if not (math.isfinite(one) and math.isfinite(other)):
        return False
    if tolerance is not None:
        return (_is_float(got) or _is_float(wanted)) and near(one, other, tolerance)
    if one == other == 0.0:
        return _is_float(got) and _is_float(wanted)  # the sign of zero
    rounded = max(_significant(got), _significant(wanted)) in _DIGITS
    return rounded and _is_float(wanted) and near(one, other, ROUNDING)


def _is_float(text: str) -> bool:
    return any(c in text for c in ".eE")


def _significant(text: str) -> int:
    """Return the number of significant digits of a number in text form."""
    digits = re.split(r"[eE]", text)[0].lstrip("+-").replace(".", "").lstrip("0")
    return len(digits)


def same_value(stdout: str, expected: str, tolerance: float | None = None) -> bool:
    """Compare as JSON values: 1.0 equals 1. APPS wraps some expected results into a list.

    A number with decimals may differ by the tolerance, by default by a rounding error. Text that is
    equal is the same value, also `NaN`.
    """
    try:
        value = json.loads(expected)
    except ValueError:
        value = expected
    limit = ROUNDING if tolerance is None else tolerance
    try:
        if stdout.strip() == expected.strip():
            return True
        got = json.loads(stdout)
        return _alike(got, value, limit) or _alike([got], value, limit)
    except (ValueError, RecursionError, MemoryError):
        return False  # A program may print anything: that is a wrong answer.


def _alike(got: Any, wanted: Any, tolerance: float) -> bool:
    if isinstance(got, list) and isinstance(wanted, list):
        return len(got) == len(wanted) and all(
            _alike(a, b, tolerance) for a, b in zip(got, wanted, strict=True)
        )
    if isinstance(got, dict) and isinstance(wanted, dict):
        return got.keys() == wanted.keys() and all(
            _alike(value, wanted[key], tolerance) for key, value in got.items()
        )
    plain = (type(got), type(wanted)) in ((float, float), (float, int), (int, float))
    return bool(got == wanted or (plain and near(got, wanted, tolerance)))


def near(got: float, wanted: float, tolerance: float) -> bool:
    """Return whether two numbers differ by at most `tolerance` times the expected number.

    If the expected number is 0, the tolerance is absolute. NaN equals NaN.
    """
    try:
        one, other = float(got), float(wanted)
    except OverflowError:
        return False
    if math.isnan(one) and math.isnan(other):
        return True
    if not (math.isfinite(one) and math.isfinite(other)):
        return one == other
    return abs(one - other) <= tolerance * (abs(other) or 1.0)
