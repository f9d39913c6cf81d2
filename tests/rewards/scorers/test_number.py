"""Answers that are one number are read in the notations that people use."""

from __future__ import annotations

from fractions import Fraction

import pytest

from slipstream.rewards.scorers.number import equal, joined, leading, read, same, unwrapped


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5),
        ("-5", -5),
        ("+5", 5),
        ("\u22125", -5),
        ("\u20135", -5),
        ("- 5", -5),
        ("5.", 5),
        ("5.00", 5),
        (".5", Fraction(1, 2)),
        ("007", 7),
        ("1,000", 1000),
        ("1,234,567.50", Fraction(2469135, 2)),
        ("12,34,567", 1234567),
        ("1 000 000", 1000000),
        ("1\u202f000", 1000),
        (r"1\,000", 1000),
        (r"1\ 000", 1000),
        ("1~000", 1000),
        ("1{,}000", 1000),
        (r"1,\!000", 1000),
        ("1'000", 1000),
        (r"\$5", 5),
        ("$5", 5),
        ("-$5", -5),
        ("$-5", -5),
        ("US$5", 5),
        ("€5", 5),
        ("5 €", 5),
        (r"\$1{,}234.50", Fraction(2469, 2)),
        ("$5$", 5),
        ("$$5$$", 5),
        (r"\(5\)", 5),
        (r"\[5\]", 5),
        ("{{5}}", 5),
        (r"\text{5}", 5),
        (r"\mathbf{5}", 5),
        (r"\boxed {5}", 5),
        ("**5**", 5),
        (r"\displaystyle 5", 5),
        ("1e-3", Fraction(1, 1000)),
        ("1.5E3", 1500),
        (r"3 \times 10^{4}", 30000),
        (r"3\cdot10^4", 30000),
        ("2\u00d710^{-1}", Fraction(1, 5)),
        ("10^{3}", 1000),
        ("-10^{-2}", Fraction(-1, 100)),
        ("1/2", Fraction(1, 2)),
        (r"\frac12", Fraction(1, 2)),
        (r"-\dfrac{3}{4}", Fraction(-3, 4)),
        (r"\frac{-3}{4}", Fraction(-3, 4)),
        ("½", Fraction(1, 2)),
        (r"5\text{ cm}", 5),
        (r"5\text{cm}", 5),
        (r"5~\mathrm{cm}^2", 5),
        ("5 cm", 5),
        ("5 million", 5_000_000),
        (r"\$2.5\text{ billion}", 2_500_000_000),
        ("1 1/2", Fraction(3, 2)),
        (r"-3\frac{1}{2}", Fraction(-7, 2)),
        ("5 dollars", 5),
        (r"5\text{ apples}", 5),
        (r"5^\circ", 5),
        (r"5^{\circ}", 5),
        ("5°", 5),
        ("5°C", 5),
        (r"5^\circ\text{C}", 5),
    ],
)
def test_read(text: str, value: Fraction | int) -> None:
    number = read(text)
    assert number is not None
    assert number.value == value


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "$", "-", "nan", "inf", "True", "٣", "one"),
        *(
            "1,2",
            "12,345,6",
            "0,123",
            "1 2",
            "1.000.000",
            "1.2.3",
            "12:30",
            "1/2/3",
            "1/0",
            "1 5/2",
            "10^x",
            "2^3",
            "10^{999}",
            "5 cm C",
            "1 0/2",
        ),
        *("--5", "5x", "5 x", "5 m", r"5\pi", "5 or 6", "5, 6", "$5$ and $6$", "(5)", "5!"),
        *(r"5\text{ or more}", r"5\mathrm{i}", r"5\mathrm{e}"),
        *("1e999", "9" * 2_000, r"5\right.", "10_{3}"),
    ],
)
def test_other_texts_are_not_read(text: str) -> None:
    assert read(text) is None


def test_percent_and_units() -> None:
    for text in ("50%", r"50\%", r"50 \%", "50 percent", r"50\text{ percent}", r"$50\%$"):
        number = read(text)
        assert number is not None
        assert number.value == 50
        assert number.percent
    units = {
        "5 cm": "cm",
        r"5\text{ centimeters}": "cm",
        "$5": "$",
        "5 dollars": "$",
        "5°": "degree",
    }
    for text, unit in units.items():
        number = read(text)
        assert number is not None
        assert number.unit == unit


@pytest.mark.parametrize(
    ("one", "other", "alike", "by_value"),
    [
        ("1,000", "1000.0", True, True),
        ("50%", "50", True, True),
        ("50%", "0.5", True, True),
        ("50%", r"\frac12", True, True),
        ("50%", "5%", False, False),
        ("50", "0.5", False, False),
        ("0.5%", "50%", False, False),
        ("5 cm", "5", True, True),
        ("5 cm", "5 centimeters", True, True),
        ("5 cm", "5 km", False, False),
        ("€5", "$5", False, False),
        ("1/4", "0.25", True, True),
        (r"\frac{1}{4}", "1/4", True, True),
        ("2/4", "1/2", False, True),
        ("4/2", "2", False, True),
        ("1 1/2", "3/2", True, True),
        ("1 1/2", "1.5", True, True),
        ("1 1/2", "11/2", False, False),
        ("5 million", "5", False, False),
        ("-1/2", "1/2", False, False),
        ("0.333333", "1/3", False, False),
        ("1e-9", "2e-9", False, False),
        ("1e-9", "0", False, False),
        ("5", "x", False, False),
    ],
)
def test_same(one: str, other: str, alike: bool, by_value: bool) -> None:
    assert same(one, other) is same(other, one) is alike
    assert same(one, other, by_value=True) is same(other, one, by_value=True) is by_value


def test_equal_compares_numbers_that_were_read() -> None:
    one, other = read("18"), leading("18.00 dollars")
    assert one is not None
    assert other is not None
    assert equal(one, other)


def test_leading() -> None:
    found = {text: leading(text) for text in ("18. Done", "$1,000 or", "1 000", "1/2.", "-5%")}
    assert {text: number and number.text for text, number in found.items()} == {
        "18. Done": "18",
        "$1,000 or": "1000",
        "1 000": "1000",
        "1/2.": "1/2",
        "-5%": "-5",
    }
    assert [leading(text) for text in ("1,2", "1.2.3", "x", "", "1/2/3")] == [None] * 5


def test_notation_in_latex() -> None:
    texts = ("18.00", "007", "-0.50", "1e-3", "1.5e3", "1e-60", "2/4", r"50 \%")
    found = [number.latex for text in texts if (number := read(text)) is not None]
    numbers = ["18", "7", "-0.5", "0.001", "1500"]
    assert found == [*numbers, r"1 \cdot 10^{-60}", r"\frac{2}{4}", r"50\%"]


def test_thousands_are_joined_inside_expressions() -> None:
    assert joined(r"x = 1\,000 + 2 000 000") == "x = 1000 + 2000000"
    assert joined(r"(1, 2) 12 34 0.1 000 \begin{pmatrix}1\\ 200\end{pmatrix}") == (
        r"(1, 2) 12 34 0.1 000 \begin{pmatrix}1\\ 200\end{pmatrix}"
    )


def test_markup_around_an_answer_is_removed() -> None:
    assert unwrapped(r" $\text{(A)}$. ") == "(A)"
    assert unwrapped(r"\left\{ 5 \right.") == r"\left\{ 5 \right."
    assert unwrapped("$x$ and $y$") == "$x$ and $y$"
    assert unwrapped("{1}{2}") == "{1}{2}"
    assert unwrapped(r"\frac{1}{2}") == r"\frac{1}{2}"
    assert unwrapped("{" * 100_000 + "}" * 100_000) == "{" * 100_000 + "}" * 100_000
