"""The date that chat templates write can be fixed."""

from __future__ import annotations

import datetime

import pytest

from slipstream.data.template_date import reads_date, set_template_date
from tests.data.helpers import STYLES, byte_tokenizer

DAY = datetime.date(2024, 7, 26)
TURN = [{"role": "user", "content": "hi"}]


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Clock:
        return cls(2031, 5, 4, 3, 2, 1)


def test_the_date_is_fixed_at_midnight_and_can_be_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Clock)
    tokenizer = byte_tokenizer([], STYLES["dated"])
    now = "Today: 04 May 2031 03:02. user: hi<|end|>"
    assert tokenizer.apply_chat_template(TURN, tokenize=False) == now
    set_template_date(tokenizer, DAY)
    fixed = "Today: 26 Jul 2024 00:00. user: hi<|end|>"
    assert tokenizer.apply_chat_template(TURN, tokenize=False) == fixed
    set_template_date(tokenizer)
    assert tokenizer.apply_chat_template(TURN, tokenize=False) == now


def test_a_date_that_the_caller_passes_is_used() -> None:
    """As Llama 3.1's template does with `date_string`."""
    template = (
        "{% if date_string is not defined %}{% set date_string = strftime_now('%Y') %}{% endif %}"
        "{{ date_string }}"
    )
    tokenizer = byte_tokenizer([], template)
    set_template_date(tokenizer, DAY)
    assert tokenizer.apply_chat_template(TURN, tokenize=False) == "2024"
    assert tokenizer.apply_chat_template(TURN, tokenize=False, date_string="never") == "never"


def test_templates_by_name_and_templates_without_a_date() -> None:
    tokenizer = byte_tokenizer([], STYLES["chatml"])
    assert not reads_date(tokenizer)
    set_template_date(tokenizer, DAY)
    assert not reads_date(byte_tokenizer([], None))
    tokenizer.chat_template = {"default": STYLES["chatml"], "tool_use": STYLES["dated"]}
    assert reads_date(tokenizer)
    set_template_date(tokenizer, DAY)
    text = tokenizer.apply_chat_template(TURN, chat_template="tool_use", tokenize=False)
    assert text.startswith("Today: 26 Jul 2024")
    set_template_date(tokenizer)
