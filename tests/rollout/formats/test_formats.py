"""Call formats: each parses calls as its models write them, and names what it cannot parse."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from slipstream.errors import ConfigError
from slipstream.rollout.formats import registry
from slipstream.rollout.formats.hermes import HermesFormat
from slipstream.rollout.formats.registry import (
    call_format_names,
    format_of_template,
    get_call_format,
    register_call_format,
)
from tests.rollout.tool_templates import TEMPLATES

CALLS = {
    "hermes": 'hm\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x"}}\n</tool_call>',
    "qwen3_coder": "hm\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
    "<parameter=b>\nx\n</parameter>\n</function>\n</tool_call>",
    "llama3_json": '{"name": "add", "parameters": {"a": 1, "b": "x"}}',
    "mistral": 'hm[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": "x"}}]',
    "gpt-oss": "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.add <|constrain|>json<|message|>{"a": 1, "b": "x"}',
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
        },
    }
]


def test_all_formats_are_registered() -> None:
    assert call_format_names() == sorted(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_has_name_and_typed_arguments(name: str) -> None:
    (call,) = get_call_format(name).parse(CALLS[name], TOOLS).calls
    assert (call.name, call.arguments, call.problem) == ("add", {"a": 1, "b": "x"}, None)
    assert len(call.id) == 9
    assert call.id.isalnum()


@pytest.mark.parametrize(("name", "content"), [("hermes", "hm"), ("mistral", "hm")])
def test_the_text_before_a_call_is_the_content(name: str, content: str) -> None:
    assert get_call_format(name).parse(CALLS[name], TOOLS).content == content


@pytest.mark.parametrize("name", CALLS)
def test_text_without_calls_is_content(name: str) -> None:
    parsed = get_call_format(name).parse("just text", TOOLS)
    assert (parsed.content, parsed.reasoning, list(parsed.calls)) == ("just text", None, [])


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {}', "no </tool_call>"),
        ("hermes", '<tool_call>{"name": "add",}</tool_call>', "not valid JSON"),
        ("hermes", '<tool_call>{"name": "add", "arguments": NaN}</tool_call>', "NaN"),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "JSON object"),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', '"name"'),
        ("hermes", "<tool_call>[]</tool_call>", "JSON object"),
        ("hermes", f"<tool_call>{'[' * 100_000}</tool_call>", "not valid JSON"),
        ("qwen3_coder", "<tool_call><function=add></tool_call>", "</function>"),
        ("qwen3_coder", "<tool_call><function=add>x</function></tool_call>", "unexpected text"),
        ("llama3_json", '{"name": "add", "parameters": {', "not valid JSON"),
        ("llama3_json", '{"answer": 3}', '"name"'),
        ("llama3_json", "<|python_tag|>", "no JSON object"),
        ("mistral", '[TOOL_CALLS]{"name": "add"}', "JSON list"),
        ("mistral", "[TOOL_CALLS]add[ARGS]{1}", "not valid JSON"),
        ("gpt-oss", "<|channel|>commentary to=functions.add<|message|>{1}", "not valid JSON"),
    ],
)
def test_a_call_that_cannot_be_parsed_has_a_problem_and_stays_in_the_content(
    name: str, text: str, problem: str
) -> None:
    parsed = get_call_format(name).parse(text, TOOLS)
    (call,) = parsed.calls
    assert call.problem is not None
    assert problem in call.problem
    assert parsed.content


def test_several_calls_keep_their_order() -> None:
    one = '<tool_call>{"name": "f", "arguments": {"n": %d}}</tool_call>'
    parsed = HermesFormat().parse(f"a {one % 1} b {one % 2} c", [])
    assert [call.arguments for call in parsed.calls] == [{"n": 1}, {"n": 2}]
    assert len({call.id for call in parsed.calls}) == 2
    assert parsed.content == "a  b  c"


def test_llama_calls_are_separated_by_semicolons() -> None:
    text = '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"x": 1}}'
    parsed = get_call_format("llama3_json").parse(text, [])
    assert [call.name for call in parsed.calls] == ["f", "g"]


def test_newer_mistral_calls_name_the_tool_before_the_arguments() -> None:
    text = '[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{}'
    parsed = get_call_format("mistral").parse(text, [])
    assert [(call.name, call.arguments) for call in parsed.calls] == [("f", {"x": 1}), ("g", {})]


def test_coder_values_have_the_types_of_the_schema() -> None:
    text = (
        "<tool_call><function=add><parameter=a>oops</parameter><parameter=b>7</parameter>"
        "</function></tool_call>"
    )
    (call,) = get_call_format("qwen3_coder").parse(text, TOOLS).calls
    assert call.arguments == {"a": "oops", "b": "7"}


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nwhy\n</think>\n\nso", "why", "so"),
        ("why\n</think>\n\nso", "why", "so"),
        ("<think>\n\n</think>\n\nso", "", "so"),
        ("<think>never ends", "never ends", ""),
        ("so", None, "so"),
    ],
)
def test_reasoning_is_split_off(text: str, reasoning: str | None, content: str) -> None:
    parsed = HermesFormat().parse(text, [])
    assert (parsed.reasoning, parsed.content) == (reasoning, content)


def test_a_call_within_reasoning_is_no_call() -> None:
    text = '<think><tool_call>{"name": "f", "arguments": {}}</tool_call></think>so'
    assert not HermesFormat().parse(text, []).calls


def test_harmony_channels_are_reasoning_and_content() -> None:
    text = "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>so"
    parsed = get_call_format("gpt-oss").parse(text, [])
    assert (parsed.reasoning, parsed.content, list(parsed.calls)) == ("why", "so", [])


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen25", "hermes"),
        ("qwen3", "hermes"),
        ("llama31", "llama3_json"),
        ("mistral", "mistral"),
    ],
)
def test_the_format_is_found_in_the_template(family: str, name: str) -> None:
    assert format_of_template(TEMPLATES[family]).name == name


def test_a_template_without_tool_calls_names_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"multi_turn\.format"):
        format_of_template("{{ messages }}")


def test_unknown_and_used_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="hermes"):
        get_call_format("hermse")
    with pytest.raises(ConfigError, match="hermes"):
        register_call_format(HermesFormat())


PIECES = [
    *("<tool_call>", "</tool_call>", "<function=", "<parameter=", "</function>", ">", "<think>"),
    *("</think>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|channel|>", "<|message|>", "<|call|>"),
    *("<|end|>", "<|start|>assistant", " to=functions.f", "<|python_tag|>", '{"name": "f"', "{}"),
    *('"arguments": {', "}", "[", "]", ";", "text", "\\ud800", "\n", '"', "1e999", "NaN"),
]


@pytest.mark.parametrize("name", CALLS)
def test_no_text_makes_a_parser_raise(name: str) -> None:
    draws = Random(0)
    for _ in range(500):
        text = "".join(draws.choices(PIECES, k=draws.randrange(12)))
        for call in get_call_format(name).parse(text, TOOLS).calls:
            assert call.problem is not None or call.name


@pytest.mark.parametrize("name", CALLS)
def test_parsers_need_linear_time(name: str) -> None:
    """Quadratic time would be minutes."""
    for piece in PIECES:
        get_call_format(name).parse(piece * 20_000, TOOLS)


def test_the_template_of_gpt_oss_is_recognized() -> None:
    template = (
        "<|start|>assistant to={{ 'functions.' + name }}"
        "<|channel|>commentary json<|message|><|call|>"
    )
    assert format_of_template(template).name == "gpt-oss"


def test_an_own_format_can_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_FORMATS", dict(registry._FORMATS))

    class Mine(HermesFormat):
        name = "mine"

    register_call_format(Mine())
    assert get_call_format("mine").name == "mine"
