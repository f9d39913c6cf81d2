"""Each math scorer scores a table of answers. The table says where the right score comes from.

The three lists of a scorer differ in that source:

- `AS_VERL`: the rule of verl's scorer of the same name, as of verl 0.9.1.
- `RIGHT`: by hand. The answer is right; verl's rule scores it as wrong.
- `WRONG`: by hand. The answer is wrong; verl's rule scores it as right.

`docs/rewards.md` lists these differences.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from slipstream.rewards.functions import default_compute_score

pytest.importorskip("math_verify", reason="the extra `math` is not installed")

Row = tuple[str, str, float]
"""Response, ground truth, right score."""

AS_VERL: dict[str, list[Row]] = {
    "openai/gsm8k": [
        ("42", "42", 0.0),
        ("#### 42", "42", 1.0),
        ("#### 41", "42", 0.0),
        ("#### -42", "42", 0.0),
        ("#### 42 apples", "42", 1.0),
        ("#### 1,234", "1234", 1.0),
        ("#### 50%", "50", 1.0),
        ("#### 41\n#### 42", "42", 1.0),
        ("#### 42\n#### 41", "42", 0.0),
        ("####42", "42", 0.0),
        ("####  42", "42", 0.0),
        (r"#### \boxed{42}", "42", 0.0),
        ("#### **42**", "42", 0.0),
        ("#### forty-two", "42", 0.0),
        ("#### $-5", "5", 0.0),
        ("#### 18.01", "18", 0.0),
    ],
    "lighteval/MATH": [
        (r"\boxed{5}", "5", 1.0),
        (r"\boxed{-5}", "5", 0.0),
        ("5", "5", 0.0),
        (r"\boxed{4} or \boxed{5}", "5", 1.0),
        (r"\boxed{5} or \boxed{4}", "5", 0.0),
        (r"\boxed{5", "5", 0.0),
        (r"$\boxed 5$", "5", 1.0),
        (r"\boxed{\dfrac12}", r"\frac{1}{2}", 1.0),
        (r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"\boxed{1/2}", r"\frac{1}{2}", 1.0),
        (r"\boxed{2/4}", r"\frac{1}{2}", 0.0),
        (r"\boxed{50\%}", "50", 1.0),
        (r"\boxed{50 \%}", r"50\%", 1.0),
        (r"\boxed{\$5}", "5", 1.0),
        (r"\boxed{90^\circ}", "90", 1.0),
        (r"\boxed{5\text{ cm}}", "5", 1.0),
        (r"\boxed{x = 5}", "5", 1.0),
        (r"\boxed{\sqrt8}", r"2\sqrt2", 0.0),
        (r"\boxed{(2,1)}", "(1,2)", 0.0),
        (r"\boxed{1,2}", "12", 0.0),
        (r"\boxed{50}", "0.5", 0.0),
        (r"\boxed{1.000}", "1000", 0.0),
        (r"\boxed{0.33}", r"\frac{1}{3}", 0.0),
    ],
    "math_dapo": [
        ("Answer: 42", "42", 1.0),
        ("42", "42", -1.0),
        ("Answer: 41", "42", -1.0),
        ("answer : 42", "42", 1.0),
        ("Answer: $42$.", "42", 1.0),
        (r"Answer: \boxed{42}", "42", 1.0),
        (r"so \boxed{42}", "42", 1.0),
        ("Answer: 41\nAnswer: 42", "42", 1.0),
        ("Answer: 42\nAnswer: 41", "42", -1.0),
        ("Answer: 42 or 43", "42", -1.0),
        ("Answer: 42 dollars", "42", 1.0),
        ("Answer: 1,234", "1234", 1.0),
        ("Answer: x = 42", "42", 1.0),
        ("Answer: 1, 2", "1,2", 1.0),
        ("The answer is 42", "42", -1.0),
        ("Answer: 4.2", "42", -1.0),
        ("Answer: 0", "1 000", -1.0),
    ],
    "math_verify": [
        (r"\boxed{5}", "5", 1.0),
        ("The answer is 5.", "5", 1.0),
        (r"\boxed{6}", "5", 0.0),
        (r"\boxed{2/4}", r"\frac12", 1.0),
        (r"\boxed{\sqrt8}", r"2\sqrt2", 1.0),
        (r"\boxed{0.333333}", r"\frac13", 1.0),
        (r"\boxed{0.333}", r"\frac13", 0.0),
        (r"\boxed{\pi}", "3.14", 0.0),
        (r"\boxed{(2,1)}", "(1,2)", 0.0),
        (r"\boxed{50}", "0.5", 0.0),
    ],
    "numina_olympiads": [
        (r"\boxed{5}", "5", 1.0),
        ("5", "5", 1.0),
        ("x = 5", "5", 1.0),
        ("The answer is 5.", "5", 1.0),
        ("5 is the answer", "5", 1.0),
        ("So we get 5", "5", 1.0),
        ("Result: 5", "5", 1.0),
        ("The answer is not 5", "5", 0.0),
        ("6 is the answer", "5", 0.0),
        ("5 or 6", "5", 0.0),
        ("so 5", "5", 0.0),
        ("1 000", "1000", 1.0),
        (r"\boxed{\frac{2}{4}}", "0.5", 1.0),
        (r"\boxed{50\%}", "50", 1.0),
        (r"\boxed {5}", "5", 1.0),
        (r"\boxed{0}", "1 000", 0.0),
    ],
    "hiyouga/geometry3k": [
        (r"<think>a</think>\boxed{5}", "5", 1.0),
        (r"\boxed{5}", "5", 0.9),
        (r"<think>a</think>\boxed{4}", "5", 0.1),
        ("<think>a</think>5", "5", 0.0),
        (r"<think>a</think>\boxed{5.0}", "5", 1.0),
        (r"<think>a</think>\boxed{\sqrt{8}}", r"2\sqrt{2}", 1.0),
        (r"<think>a</think>\boxed{2/4}", r"\frac{1}{2}", 0.1),
    ],
}
"""verl's rule."""

RIGHT: dict[str, list[Row]] = {
    "openai/gsm8k": [
        ("#### 42.", "42", 1.0),
        ("#### $42", "42", 1.0),
        ("#### $-5", "-5", 1.0),
        ("#### -$5", "-5", 1.0),
        ("#### 18.00", "18", 1.0),
        ("#### €42", "42", 1.0),
        ("#### 1 234", "1234", 1.0),
        ("#### 1234", "1,234", 1.0),
        ("#### +42", "42", 1.0),
        ("#### \u221242", "-42", 1.0),
        ("#### 4.2e1", "42", 1.0),
    ],
    "lighteval/MATH": [
        (r"\boxed {5}", "5", 1.0),
        (r"\boxed{5.0}", "5", 1.0),
        (r"\boxed{5.}", "5", 1.0),
        (r"\boxed{1,000}", "1000", 1.0),
        (r"\boxed{1\,000}", "1000", 1.0),
        (r"\boxed{$5$}", "5", 1.0),
        (r"\boxed{\(5\)}", "5", 1.0),
        (r"\boxed{{5}}", "5", 1.0),
        (r"\boxed{\text{east}}", "east", 1.0),
        (r"\boxed{50%}", "50", 1.0),
        (r"\boxed{50\%}", r"\frac{1}{2}", 1.0),
        (r"\boxed{0.25}", r"\frac{1}{4}", 1.0),
        (r"\boxed{3\times 10^{4}}", "30000", 1.0),
        (r"\boxed{5\text{cm}}", "5", 1.0),
        ("\\boxed{90°}", "90", 1.0),
        ("\\boxed{\u22125}", "-5", 1.0),
        (r"\boxed{1\frac{1}{2}}", r"\frac{3}{2}", 1.0),
    ],
    "math_dapo": [
        ("Answer: 42.", "42", 1.0),
        (r"Answer: \(42\)", "42", 1.0),
        ("Answer:\n\n$$42$$", "42", 1.0),
        ("Answer:\n\\[\n42\n\\]", "42", 1.0),
        ("**Answer:** 42", "42", 1.0),
        ("Answer: **42**", "42", 1.0),
        ("Answer: 42.0", "42", 1.0),
        ("Answer: 042", "42", 1.0),
        (r"Answer: 50\%", "50", 1.0),
        (r"Answer: 1\,234", "1234", 1.0),
        ("Answer: 0.5", r"\frac{1}{2}", 1.0),
        (r"Answer: \dfrac{1}{2}", r"\frac12", 1.0),
        ("Answer: €42", "42", 1.0),
        ("Answer: \u221242", "-42", 1.0),
        (r"so \boxed {42}", "42", 1.0),
    ],
    "math_verify": [
        (r"\boxed{4} no, \boxed{5}", "5", 1.0),
        (r"\boxed {5}", "5", 1.0),
        (r"\boxed{50 \%}", r"50\%", 1.0),
        (r"\boxed{50\%}", "50", 1.0),
        (r"\boxed{0.5}", r"50\%", 1.0),
        (r"\boxed{1\,000}", "1000", 1.0),
        (r"\boxed{1000}", "1 000", 1.0),
        (r"\boxed{3.}", "3", 1.0),
        (r"\boxed{0.001}", "1e-3", 1.0),
        ("\\boxed{€5}", "5", 1.0),
        ("\\boxed{90°}", "90", 1.0),
    ],
    "numina_olympiads": [
        (r"\boxed{1\,000}", "1000", 1.0),
        (r"\boxed{2^3}", "8", 1.0),
        (r"\boxed{\{1,2\}}", r"\{2,1\}", 1.0),
        ("\\boxed{\u22125}", "-5", 1.0),
    ],
    "hiyouga/geometry3k": [
        (r"<think>a</think>\boxed {5}", "5", 1.0),
        ("<think>a</think>\\boxed{90°}", "90", 1.0),
        (r"<think>a</think>\boxed{1\,000}", "1000", 1.0),
    ],
}
"""By hand: right answers that verl's rule scores as wrong."""

WRONG: dict[str, list[Row]] = {
    "openai/gsm8k": [
        ("#### 4,2", "42", 0.0),
        ("#### 42/2", "42", 0.0),
        ("#### 42 000", "42", 0.0),
    ],
    "lighteval/MATH": [
        (r"\boxed{1 2}", "12", 0.0),
        (r"\boxed{1 1/2}", r"\frac{11}{2}", 0.0),
        (r"\boxed{5\text{ cm}}", r"5\text{ km}", 0.0),
        (r"\boxed{5\text{ million}}", "5", 0.0),
    ],
    "math_dapo": [
        ("Answer: 12", "1,2", -1.0),
        ("Answer: 1,2", "12", -1.0),
        ("Answer: 1 2", "12", -1.0),
        ("Answer: $42$ or $43$", "42", -1.0),
        (r"Answer: 5\text{ cm}", r"5\text{ km}", -1.0),
    ],
    "math_verify": [
        (r"\boxed{0}", "1 000", 0.0),
        (r"\boxed{\frac{1}{2006!}}", r"\frac{1}{2004!}", 0.0),
        (r"\boxed{\frac{1}{2^{98}}}", r"\frac{1}{2^{99}}", 0.0),
        (r"\boxed{0.0000001}", "0.0000002", 0.0),
        (r"\boxed{5\text{ cm}}", r"5\text{ km}", 0.0),
    ],
    "numina_olympiads": [
        (r"\boxed{100}", "1", 0.0),
        (r"\boxed{50}", "0.5", 0.0),
        (r"\boxed{12}", "1,2", 0.0),
        (r"\boxed{3.14}", r"\pi", 0.0),
        (r"\boxed{5", "5", 0.0),
    ],
    "hiyouga/geometry3k": [
        (r"<think>a</think>\boxed{5\text{ cm}}", r"5\text{ km}", 0.1),
    ],
}
"""By hand: wrong answers that verl's rule scores as right."""

ROWS = [
    (source, *row)
    for table in (AS_VERL, RIGHT, WRONG)
    for source, rows in table.items()
    for row in rows
]


@pytest.mark.parametrize(("source", "response", "truth", "score"), ROWS)
def test_scores(source: str, response: str, truth: str, score: float) -> None:
    scored = default_compute_score(source, response, truth)
    assert (scored["score"] if isinstance(scored, Mapping) else scored) == pytest.approx(score)
