"""`exact_match` ignores only leading and trailing white space."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.rewards.functions import exact_match

MEGABYTE = "x" * 1_000_000

ANSWERS: list[tuple[str, Any, float]] = [
    ("4", "4", 1.0),
    (" 4\n", "4", 1.0),
    ("4", " 4\t", 1.0),
    ("-4", "4", 0.0),
    ("+4", "4", 0.0),
    ("4.0", "4", 0.0),
    ("1,000", "1000", 0.0),
    ("4 m", "4", 0.0),
    ("The answer is 4", "4", 0.0),
    ("4", 4, 1.0),
    ("1.5", 1.5, 1.0),
    ("1.50", 1.5, 0.0),
    ("5", 5.0, 1.0),
    ("5.0", 5.0, 1.0),
    ("5", 5.5, 0.0),
    ("5", "5.0", 0.0),
    ("yes", "Yes", 0.0),
    ("", "", 1.0),
    (" \n ", "", 1.0),
    ("", "4", 0.0),
    ("b", ["a", "b"], 1.0),
    ("c", ["a", "b"], 0.0),
    ("a b", ["a", "b"], 0.0),
    ("7", ("6", 7), 1.0),
    ("\u00e9", "\u00e9", 1.0),
    ("e\u0301", "\u00e9", 0.0),  # the same letter in two characters
    ("\u00a04\u3000", "4", 1.0),  # white space of other scripts
    ("\u0664", "4", 0.0),  # an Arabic four
    ("\\frac{1}{2}", "1/2", 0.0),
    ("\\boxed{4}", "4", 0.0),
    (MEGABYTE, MEGABYTE, 1.0),
    (MEGABYTE, "x", 0.0),
]


@pytest.mark.parametrize(("response", "truth", "expected"), ANSWERS)
def test_exact_match_scores(response: str, truth: Any, expected: float) -> None:
    assert exact_match("x", response, truth) == expected
