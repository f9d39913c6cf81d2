"""Chat templates that do not end are refused."""

from __future__ import annotations

import pytest

from slipstream.data import chat_template
from slipstream.data.chat_template import (
    MOST_CHARACTERS,
    ChatTemplateError,
    apply_chat_template,
    check_chat_template,
)
from slipstream.data.tokenizer import build_tokenizer
from slipstream.errors import DataError
from tests.data.helpers import CHATML, char_tokenizer

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    "template",
    [
        "{% set ns = namespace(s='ab') %}{% for i in range(90) %}"
        "{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
        "{{ 'a' * 99999999999 }}",
        "{{ 'a' | center(99999999999) }}",
    ],
)
def test_templates_that_fill_the_memory_are_refused(template: str) -> None:
    with pytest.raises(DataError, match=r"t: chat_template does not end.*custom_chat_template"):
        check_chat_template(template, "t")


@pytest.mark.parametrize("template", [LOOP, "{{ 9 ** 99999999 }}"])
def test_templates_that_compute_without_end_are_refused(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited = chat_template._TRIAL.replace("(20, 20)", "(1, 1)")
    assert limited != chat_template._TRIAL
    monkeypatch.setattr(chat_template, "_TRIAL", limited)
    with pytest.raises(DataError, match=r"t: chat_template does not end.*custom_chat_template"):
        check_chat_template(template, "t")


@pytest.mark.parametrize(
    ("template", "part"),
    [
        ("a" * (MOST_CHARACTERS + 1), "chat_template has 1000001 characters"),
        (5, "chat_template is int, not text"),
        ({"default": None, "tool_use": []}, "chat_template is list, not text"),
    ],
)
def test_templates_that_are_no_templates_are_refused(template: object, part: str) -> None:
    with pytest.raises(DataError, match="custom_chat_template") as caught:
        check_chat_template(template, "t")
    assert part in str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        None,
        CHATML,
        "{{ 1/0 }}",
        "{% generation %}a{% endgeneration %}",
        "{% for m in messages %}{% break %}{% endfor %}",
        "{{ strftime_now('%Y') }}{{ messages | tojson(indent=2) }}",
        {"default": CHATML, "tool_use": CHATML},
        build_tokenizer().chat_template,
    ],
)
def test_templates_that_end_are_accepted(template: object) -> None:
    check_chat_template(template, "t")


def test_a_loop_that_depends_on_the_conversation_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chat_template, "LIMIT_S", 0.2)
    tokenizer = char_tokenizer("{% if messages[0].content == 'loop' %}" + LOOP + "{% endif %}a")
    assert apply_chat_template(tokenizer, MESSAGES, tokenize=False) == "a"
    with pytest.raises(DataError, match=r"does not end.*custom_chat_template") as caught:
        apply_chat_template(tokenizer, [{"role": "user", "content": "loop"}], tokenize=False)
    assert not isinstance(caught.value, ChatTemplateError)
    # The limit is over with the call.
    assert apply_chat_template(tokenizer, MESSAGES, tokenize=False) == "a"


def test_a_template_that_fails_raises_its_reason() -> None:
    with pytest.raises(ChatTemplateError, match="ZeroDivisionError"):
        apply_chat_template(char_tokenizer("{{ 1/0 }}"), MESSAGES, tokenize=False)
