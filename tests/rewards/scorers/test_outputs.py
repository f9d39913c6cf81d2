"""Outputs and return values of programs are compared with expected ones."""

from __future__ import annotations

import pytest

from slipstream.rewards.scorers.outputs import near, same_text, same_value

PI = "3.14159265358979323846264338327950288"


# Results without a tolerance, with 1e-6, and with 0.
@pytest.mark.parametrize(
    ("printed", "expected", "default", "by_value", "exact"),
    [
        ("0.3", "0.3", True, True, True),
        ("0.3 \n\n", "0.3", True, True, True),
        # A rounding error of the program, or of the reference program.
        ("0.30000000000000004", "0.3", True, True, False),
        ("0.3", "0.30000000000000004", True, True, False),
        ("a=0.30000000000000004, [2]", "a=0.3, [2]", True, True, False),
        ("1 0.30000000000000004\n5", "1 0.3\n5", True, True, False),
        ("5.551115123125783e-17", "0.0", True, True, False),
        ("99.9999999999986", "100.0", True, True, False),
        ("-0.0", "0.0", True, True, False),
        ("-0", "0", False, False, False),
        # Another notation of the same number.
        ("0.30", "0.3", False, True, False),
        ("3e-1", "0.3", False, True, False),
        ("2", "2.0", False, True, False),
        ("2.0", "2", False, True, False),
        ("0.33333333", "0.3333333333333333", False, True, False),
        ("0.333333", "0.333334", False, False, False),
        # Other numbers.
        ("0.4", "0.3", False, False, False),
        ("-0.3", "0.3", False, False, False),
        ("0.30000000000000004", "0.4", False, False, False),
        ("0.3000000001000000", "0.3", False, True, False),
        ("1000001", "1000000", False, False, False),
        ("100000000000000001", "100000000000000000", False, False, False),
        ("2.0000000000000004", "2", False, True, False),
        ("1e-9", "2e-9", False, False, False),
        (PI, PI[:-1] + "9", False, True, False),
        (PI[:17], PI, False, True, False),
        ("1e400", "1e500", False, False, False),
        ("1.2.3", "1.2.30", False, False, False),
        ("x1.0", "x1.00", False, False, False),
        ("12:30", "12:3", False, False, False),
        ("nan", "0.3", False, False, False),
        ("nan", "nan", True, True, True),
        # Another layout or other text.
        ("0.30000000000000004 0.1", "0.3", False, False, False),
        ("0.30000000000000004\n", "0.3\n1", False, False, False),
        ("0.30000000000000004  1", "0.3 1", False, False, False),
        ("yes 0.30000000000000004", "no 0.3", False, False, False),
        ("", "0.3", False, False, False),
        ("9" * 60_000 + "x", "9" * 60_000 + "y", False, False, False),
    ],
)
def test_printed_text(
    printed: str, expected: str, default: bool, by_value: bool, exact: bool
) -> None:
    found = [same_text(printed, expected, tolerance) for tolerance in (None, 1e-6, 0.0)]
    assert found == [default, by_value, exact]


@pytest.mark.parametrize(
    ("returned", "expected", "default", "by_value", "exact"),
    [
        ("1.0", "1", True, True, True),
        ("[1]", "1", False, False, False),
        ("1", "[1]", True, True, True),  # APPS wraps some results
        ("true", "1", True, True, True),  # as in Python
        ("0.30000000000000004", "0.3", True, True, False),
        ("2.9999999999999996", "3", True, True, False),
        ('{"a": [0.30000000000000004]}', '{"a": [0.3]}', True, True, False),
        ("0.30000000000000004", "[0.3]", True, True, False),
        ("0.3333333", "0.3333333333", False, True, False),
        ("NaN", "NaN", True, True, True),
        ("[NaN, 1]", "[NaN,1]", True, True, True),
        ("Infinity", "Infinity", True, True, True),
        ("Infinity", "-Infinity", False, False, False),
        ("NaN", "3", False, False, False),
        ("0.4", "0.3", False, False, False),
        ("3", "4", False, False, False),
        ("10000001", "10000000", False, False, False),
        ("1e-9", "2e-9", False, False, False),
        ('"0.30000000000000004"', '"0.3"', False, False, False),
        ("true", "1.0000001", False, False, False),
        ("[0.3, 1]", "[0.3]", False, False, False),
        ('{"a": 1}', '{"b": 1}', False, False, False),
        ("null", "0", False, False, False),
        ("abc", "3", False, False, False),
        ("[" * 60_000, "3", False, False, False),
    ],
)
def test_returned_values(
    returned: str, expected: str, default: bool, by_value: bool, exact: bool
) -> None:
    found = [same_value(returned, expected, tolerance) for tolerance in (None, 1e-6, 0.0)]
    assert found == [default, by_value, exact]


def test_near_is_relative_to_the_expected_number() -> None:
    assert near(1.1e-300, 1e-300, 0.11)
    assert not near(1.2e-300, 1e-300, 0.11)
    assert near(1e-7, 0.0, 1e-6)
    assert not near(1e-5, 0.0, 1e-6)
    assert not near(10**400, 1.0, 1e-6)
