"""Draft plans: parsing, formatting and valid shapes."""

from __future__ import annotations

import pytest

from slipstream.errors import ConfigError
from slipstream.inference.speculation.plan import OFF, DraftPlan


@pytest.mark.parametrize("text", ["8_4_32", "3_1_4", "1_1_2", "0_0_1", "2_3_13"])
def test_parsing_and_formatting_are_inverse(text: str) -> None:
    assert str(DraftPlan.parse(text)) == text


def test_the_plan_of_a_chain() -> None:
    assert DraftPlan.chain(3) == DraftPlan(3, 1, 4)
    assert DraftPlan.chain(0) == OFF


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8-4-32", "expected steps_topk_verify"),
        ("3_1", "expected steps_topk_verify"),
        ("0_1_2", "steps and topk must be at least 1"),
        ("3_1_5", "a chain of 3 drafts needs verify_tokens=4; write 3_1_4"),
        ("2_3_14", "at most 12 drafts, so verify_tokens must be from 2 to 13"),
        ("3_1_2", "write 3_1_4"),
        ("2_3_1", "must be from 2 to 13"),
    ],
)
def test_invalid_shapes_are_errors(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DraftPlan.parse(text)
