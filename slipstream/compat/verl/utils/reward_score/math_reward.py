r"""verl's module `verl.utils.reward_score.math_reward`: answers in `\boxed{}` (MATH)."""

from __future__ import annotations

from typing import Any

from slipstream.compat.verl.utils.reward_score.boxes import BOXED, FBOX, braced, unwrapped
from slipstream.rewards.scorers import latex, math_boxed

__all__ = ["compute_score", "is_equiv", "last_boxed_only_string", "remove_boxed", "strip_string"]

_SPACED = BOXED + " "


def strip_string(string: str) -> str:
    """Return the normal form of an answer (the rules of MATH)."""
    return latex.normalised(string)


def compute_score(solution_str: str, ground_truth: Any) -> float:
    """Return 1.0 if the last box equals the ground truth in MATH's normal form, else 0.0.

    Raises ValueError if there is no ground truth.
    """
    return math_boxed.compute_score("", solution_str, ground_truth)


def is_equiv(str1: str | None, str2: str | None, verbose: bool = False) -> bool:
    """Return whether two answers have the same normal form, or are both None.

    With `verbose`, the normal forms are printed.
    """
    if str1 is None or str2 is None:
        return str1 is str2
    one, two = strip_string(str1), strip_string(str2)
    if verbose:
        print(one, two)
    return one == two


def last_boxed_only_string(string: str) -> str | None:
    r"""Return the last box with its command, such as `\boxed{42}` or `\fbox{42}`; None without.

    If the text has `\boxed` with a space behind it, the box ends at the next `$`.
    """
    if _SPACED in string:
        return _SPACED + string.rsplit(_SPACED, 1)[1].split("$", 1)[0]
    start = string.rfind(BOXED)
    if start < 0:
        start = string.rfind(FBOX)
    return None if start < 0 else braced(string, start)


def remove_boxed(s: str) -> str:
    r"""Return the content of `\boxed{42}` or `\boxed 42`.

    Raises AssertionError, as verl does, for other texts, such as `\fbox{42}`.
    """
    if _SPACED in s:
        if not s.startswith(_SPACED):
            raise AssertionError(f"expected {_SPACED!r} at the start of {s!r}")
        return s.removeprefix(_SPACED)
    return unwrapped(s, BOXED)
