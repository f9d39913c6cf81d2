"""GSM8K answers are numbers after `####`."""

from __future__ import annotations

import pytest

from slipstream.errors import ConfigError
from slipstream.rewards.scorers.gsm8k import compute_score, extract_answer


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("", None, None),
        ("so 3 + 4 = 7\n#### 7", "7", "7"),
        ("#### 1 then #### 1,234", "1234", "1234"),
        ("#### 7 (that is 8)", "7", "8"),
        ("#### -5.", "-5", "-5"),
        ("#### - 5", "-5", "5"),
        ("#### +5", "5", "5"),
        ("#### \u22125", "-5", "-5"),
        ("#### $12.50", "12.50", "12.50"),
        ("#### -$3", "-3", "-3"),
        ("#### $-3", "-3", "-3"),
        ("#### $42", "42", "42"),
        ("#### $42$", "42", "42"),
        (r"#### \$42", "42", "42"),
        ("#### €42", "42", "42"),
        ("#### 42.", "42", "42"),
        ("#### 12 dollars", "12", "12"),
        ("#### 1/2", "1/2", "2"),
        ("#### 1,2", "1,2", "1,2"),
        ("#### 5e3", "5e3", "3"),
        ("#### 50%", "50", "50"),
        ("#### ٣", None, None),
        ("#### 1 000", "1000", "000"),
        ("#### 1\u202f000", "1000", "000"),
        ("#### 1,000,000.00", "1000000.00", "1000000.00"),
        ("####7", None, "7"),
        ("###  7", None, "7"),
        ("####  7", None, "7"),
        ("#### $ 7", "7", "7"),
        ("#### \n7", None, "7"),
        (r"#### \boxed{7}", None, "7"),
        ("the answer is 42.", None, "42"),
        ("no number, really ...", None, None),
        ("#### 7" + " " * 300, None, None),
        ("#### 7" + " " * 294, "7", "7"),
        ("1" * 1_000_000 + " #### 7", "7", "7"),
    ],
)
def test_extract_answer_strict_and_flexible(
    text: str, strict: str | None, flexible: str | None
) -> None:
    assert extract_answer(text, "strict") == strict
    assert extract_answer(text, "flexible") == flexible


def test_compute_score_compares_numbers_by_value() -> None:
    assert compute_score("gsm8k", "#### 1,000", "1000") == 1.0
    assert compute_score("gsm8k", "#### 1000", "1,000") == 1.0
    assert compute_score("gsm8k", "#### 7.00", "7") == 1.0
    assert compute_score("gsm8k", "#### 7.01", "7") == 0.0
    assert compute_score("gsm8k", "#### 18", 18.0) == 1.0
    assert compute_score("gsm8k", "#### $-5", "-5") == 1.0
    assert compute_score("gsm8k", "#### $-5", "5") == 0.0
    assert compute_score("gsm8k", "#### 1/2", "1") == 0.0
    assert compute_score("gsm8k", "#### 1,2", "12", format_score=0.1) == 0.1
    assert compute_score("gsm8k", "#### 999", "1000", format_score=0.1) == 0.1
    assert compute_score("gsm8k", "999", "1000", format_score=0.1) == 0.0
    assert compute_score("gsm8k", "1000", 1000, method="flexible", score=2.0) == 2.0
    with pytest.raises(ConfigError, match="unknown method 'loose'"):
        extract_answer("1", "loose")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no ground truth"):
        compute_score("gsm8k", "#### 1", None)
