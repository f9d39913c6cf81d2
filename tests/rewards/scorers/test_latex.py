"""LaTeX answers are normalized."""

from __future__ import annotations

import pytest

from slipstream.rewards.scorers.latex import normalised, same


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("", ""),
        ("5", "5"),
        (" 5 \n", "5"),
        ("-5", "-5"),
        ("1,000", "1,000"),
        (r"1\!000", "1000"),
        (r"\$5", "5"),
        (r"50\%", "50"),
        ("50%", "50"),
        (r"90^\circ", "90"),
        (r"90^{\circ}", "90"),
        (r"5\text{ cm}", "5"),
        (r"5 \text{ cm}^2", "5"),
        (r"\text{east}", "east"),
        (".5", r"\frac{1}{2}"),
        ("0.50", "0.50"),
        ("1 .5", "1 0.5"),
        ("1 2", "1 2"),
        ("1 000", "1000"),
        (r"1\,000", "1000"),
        (r"\frac 1 2", r"\frac{1}{2}"),
        ("45°", "45"),
        ("\u22125", "-5"),
        (r"$\frac{1}{2}$.", r"\frac{1}{2}"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\2\end{pmatrix}"),
        ("{.25}", "0.25"),
        ("{.25}x", "{0.25}x"),
        ("1/2", r"\frac{1}{2}"),
        ("-1/2", r"\frac{-1}{2}"),
        ("a/b", "a/b"),
        (r"\frac12", r"\frac{1}{2}"),
        (r"\dfrac12", r"\frac{1}{2}"),
        (r"\tfrac{1}{2}", r"\frac{1}{2}"),
        (r"\frac1{72}", r"\frac{1}{72}"),
        (r"-\frac34x", r"-\frac{3}{4}x"),
        (r"\frac1", r"\frac1"),
        (r"\sqrt3", r"\sqrt{3}"),
        (r"\sqrt 3", r"\sqrt{3}"),
        (r"\sqrt{3}", r"\sqrt{3}"),
        ("x = 5", "5"),
        ("x=5", "5"),
        ("xyz=5", "xyz=5"),
        ("x=y=5", "x=y=5"),
        (r"\left(1, 2\right)", "(1,2)"),
        ("\\begin{pmatrix}1\\\\\\\\2\\end{pmatrix}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"),
        ("½", r"\frac{1}{2}"),
        ("9" * 100_000 + "/2", r"\frac{" + "9" * 100_000 + "}{2}"),
    ],
)
def test_normalised(answer: str, expected: str) -> None:
    assert normalised(answer) == expected


def test_same_compares_normal_forms() -> None:
    assert same(r"\dfrac{1}{2}", "0.5")
    assert same(r"x = \left( 3, \frac{\pi}2 \right)", r"(3,\frac{\pi}2)")
    assert not same("2/4", "1/2")
    assert not same("1 1/2", r"\frac{11}{2}")


def test_same_compares_plain_numbers_by_value() -> None:
    assert same("0.50", "0.5")
    assert same(r"1{,}000.0", "1 000")
    assert same(r"50\%", r"\frac12")
    assert same(r"\frac{1}{4}", "0.25")
    assert not same("0.0000001", "0.0000002")
    assert not same("0.333333", r"\frac{1}{3}")
    assert not same("4/2", "2")
