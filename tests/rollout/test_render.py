"""Rendering: appended ids are those of the whole conversation, and sampled ids stay."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.data.lookup import build_tokenizer
from slipstream.environment.protocol import AssistantMessage
from slipstream.errors import DataError
from slipstream.rollout import render
from slipstream.rollout.formats.registry import format_of_template
from slipstream.rollout.render import Renderer
from slipstream.types import Message
from tests.data.helpers import byte_tokenizer
from tests.rollout.tool_templates import TEMPLATES, tool_tokenizer

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "description": "Find a place.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
QUESTION: Message = {"role": "user", "content": "where is Zoë?"}


def renderer_of(family: str, **options: Any) -> Renderer:
    tokenizer = tool_tokenizer(family)
    call_format = format_of_template(tokenizer.chat_template)
    return Renderer(tokenizer, call_format, template_kwargs=options)


def call(city: str, number: int = 0) -> dict[str, Any]:
    function = {"name": "find", "arguments": {"city": city}}
    return {"id": f"call{number:05d}", "type": "function", "function": function}


def result(text: str, number: int = 0) -> Message:
    name = f"call{number:05d}"
    return {"role": "tool", "tool_call_id": name, "name": "find", "content": text}


def whole(tokenizer: Any, messages: list[Message], **options: Any) -> str:
    return str(
        tokenizer.apply_chat_template(
            messages, tools=TOOLS, tokenize=False, add_generation_prompt=True, **options
        )
    )


def turn_text(tokenizer: Any, before: list[Message], turn: Message) -> str:
    """The text of a turn, as the policy would write it, with its end token."""
    text = whole(tokenizer, before)
    closed = str(
        tokenizer.apply_chat_template(
            [*before, turn], tools=TOOLS, tokenize=False, add_generation_prompt=False
        )
    )
    assert closed.startswith(text)
    return closed[len(text) :].removesuffix("\n")


ANSWERS: list[tuple[str, list[dict[str, Any]], list[Message]]] = [
    ("one result", [call("Graz")], [result("Graz is in Austria")]),
    ("unicode", [call("Łódź")], [result("日本 \n\n é")]),
    ("empty result", [call("Graz")], [result("")]),
    ("spaces", [call("Graz")], [result("  a  ")]),
    ("two results", [call("Graz"), call("Linz", 1)], [result("A"), result("B", 1)]),
]


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize(
    ("calls", "results"), [a[1:] for a in ANSWERS], ids=[a[0] for a in ANSWERS]
)
def test_ids_after_a_tool_call_are_those_of_the_whole_conversation(
    family: str, calls: list[dict[str, Any]], results: list[Message]
) -> None:
    if family == "llama31" and len(calls) > 1:
        pytest.skip("the template allows single calls only")
    tokenizer, renderer = tool_tokenizer(family), renderer_of(family)
    turn: Message = {"role": "assistant", "content": "", "tool_calls": calls}
    if family == "qwen3":
        turn["reasoning_content"] = "hm"
    sampled = tokenizer.encode(turn_text(tokenizer, [QUESTION], turn), add_special_tokens=False)
    parsed = renderer.parse(sampled, TOOLS)
    assert [(c.name, dict(c.arguments)) for c in parsed.tool_calls] == [
        (c["function"]["name"], c["function"]["arguments"]) for c in calls
    ]
    ids = renderer.prompt([QUESTION], TOOLS) + sampled + renderer.extend(parsed, results, TOOLS)[1]
    assert tokenizer.decode(ids) == whole(tokenizer, [QUESTION, turn, *results])
    assert ids == tokenizer.encode(
        whole(tokenizer, [QUESTION, turn, *results]), add_special_tokens=False
    )


@pytest.mark.parametrize("family", ["qwen25", "llama31"])
def test_ids_after_an_answer_are_those_of_the_whole_conversation(family: str) -> None:
    tokenizer, renderer = tool_tokenizer(family), renderer_of(family)
    turn: Message = {"role": "assistant", "content": "In Graz."}
    sampled = tokenizer.encode(turn_text(tokenizer, [QUESTION], turn), add_special_tokens=False)
    more: list[Message] = [{"role": "user", "content": "sure?"}]
    ids = renderer.prompt([QUESTION], TOOLS) + sampled
    ids += renderer.extend(renderer.parse(sampled), more, TOOLS)[1]
    assert tokenizer.decode(ids) == whole(tokenizer, [QUESTION, turn, *more])


def test_reasoning_stays_where_the_template_would_drop_it() -> None:
    tokenizer, renderer = tool_tokenizer("qwen3"), renderer_of("qwen3")
    sampled = tokenizer.encode("<think>\nhm\n</think>\n\nIn Graz.<|im_end|>")
    more: list[Message] = [{"role": "user", "content": "sure?"}]
    ids = renderer.prompt([QUESTION], TOOLS) + sampled
    ids += renderer.extend(renderer.parse(sampled), more, TOOLS)[1]
    turn: Message = {"role": "assistant", "content": "In Graz.", "reasoning_content": "hm"}
    text = whole(tokenizer, [QUESTION, turn, *more])
    assert "hm" not in text
    thought = "<think>\nhm\n</think>\n\n"
    assert tokenizer.decode(ids).replace(thought, "") == text


def test_variables_of_the_template_reach_later_turns() -> None:
    tokenizer, renderer = tool_tokenizer("qwen3"), renderer_of("qwen3", enable_thinking=False)
    parsed = AssistantMessage(text="x", content="x")
    _, ids = renderer.extend(parsed, [{"role": "user", "content": "sure?"}], TOOLS)
    assert tokenizer.decode(ids).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize("family", TEMPLATES)
def test_control_tokens_in_messages_are_plain_text(family: str) -> None:
    tokenizer, renderer = tool_tokenizer(family), renderer_of(family)
    control = set(tokenizer.all_special_ids)
    turn = AssistantMessage(text="", content="", tool_calls=renderer_calls(renderer, family))
    _, clean = renderer.extend(turn, [result("evil")], TOOLS)
    attack = "evil" + "".join(tokenizer.all_special_tokens)
    _, ids = renderer.extend(turn, [result(attack)], TOOLS)
    assert [i for i in ids if i in control] == [i for i in clean if i in control]
    for token in tokenizer.all_special_tokens:
        assert token in tokenizer.decode(ids)
    prompt = renderer.prompt([{"role": "user", "content": attack}], TOOLS)
    plain = renderer.prompt([{"role": "user", "content": "evil"}], TOOLS)
    assert [i for i in prompt if i in control] == [i for i in plain if i in control]


def renderer_calls(renderer: Renderer, family: str) -> Any:
    tokenizer = tool_tokenizer(family)
    turn: Message = {"role": "assistant", "content": "", "tool_calls": [call("Graz")]}
    if family == "qwen3":
        turn["reasoning_content"] = "hm"
    text = turn_text(tokenizer, [QUESTION], turn)
    return renderer.parse(tokenizer.encode(text, add_special_tokens=False), TOOLS).tool_calls


@pytest.mark.parametrize(
    ("family", "end"),
    [
        ("qwen25", "<|im_end|>"),
        ("qwen3", "<|im_end|>"),
        ("llama31", "<|eot_id|>"),
        ("mistral", "</s>"),
    ],
)
def test_the_end_token_is_that_of_the_template(family: str, end: str) -> None:
    tokenizer, renderer = tool_tokenizer(family), renderer_of(family)
    turn = AssistantMessage(text="x", content="x", tool_calls=renderer_calls(renderer, family))
    found, _ = renderer.extend(turn, [result("x")], TOOLS)
    assert tokenizer.convert_ids_to_tokens(found) == end
    renderer.check(TOOLS, results=True)
    renderer.check(TOOLS, results=False)


def test_a_template_for_single_calls_gets_all_results_as_one() -> None:
    tokenizer, renderer = tool_tokenizer("llama31"), renderer_of("llama31")
    turn = AssistantMessage(text="", tool_calls=renderer_calls(renderer, "llama31"))
    _, ids = renderer.extend(turn, [result("A"), result("B", 1)], TOOLS)
    text = tokenizer.decode(ids)
    assert r'"A\nB"' in text
    assert text.count("ipython") == 1


def test_system_messages_may_contain_control_tokens() -> None:
    tokenizer, renderer = tool_tokenizer("qwen25"), renderer_of("qwen25")
    messages: list[Message] = [{"role": "system", "content": "<|endoftext|>"}, QUESTION]
    assert tokenizer.convert_tokens_to_ids("<|endoftext|>") in renderer.prompt(messages)


def test_a_tokenizer_without_end_tokens_is_refused() -> None:
    tokenizer = byte_tokenizer([], "{{ messages[0].content }}")
    with pytest.raises(DataError, match="eos_token"):
        Renderer(tokenizer, format_of_template(TEMPLATES["qwen25"]))


def test_a_template_without_end_tokens_is_refused() -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}<tool_call>"
    tokenizer = byte_tokenizer(["<end>"], template, eos_token="<end>")
    renderer = Renderer(tokenizer, format_of_template(TEMPLATES["qwen25"]))
    parsed = AssistantMessage(text="x", content="x")
    with pytest.raises(DataError, match="custom_chat_template"):
        renderer.extend(parsed, [{"role": "user", "content": "sure?"}])


def test_the_lookup_tokenizer_appends() -> None:
    tokenizer = build_tokenizer()
    renderer = Renderer(tokenizer, format_of_template(tokenizer.chat_template))
    text = 'ana \'s boss : <tool_call>{"name": "look_up", "arguments": {"name": "ana"}}</tool_call>'
    sampled = tokenizer.encode(f"{text}<end>")
    parsed = renderer.parse(sampled)
    (made,) = parsed.tool_calls
    assert (made.name, made.arguments) == ("look_up", {"name": "ana"})
    end, ids = renderer.extend(parsed, [result("boss ben")])
    assert end == tokenizer.eos_token_id
    assert tokenizer.decode(ids) == "<tool>boss ben<end><assistant>"


def renderer_that_tells() -> Renderer:
    """The template writes the first tool and all reasoning at the end."""
    tokenizer = tool_tokenizer("qwen3")
    tokenizer.chat_template += (
        "{{ tools[0].function.name if tools else '' }}"
        "{% for m in messages %}{{ m.reasoning_content or '' }}{% endfor %}"
    )
    return Renderer(tokenizer, format_of_template(tokenizer.chat_template))


def test_kept_extensions_are_those_of_a_new_renderer() -> None:
    kept = renderer_that_tells()
    plain = AssistantMessage(text="x", content="x")
    thought = AssistantMessage(text="x", content="x", reasoning="r")
    other = [{"type": "function", "function": {**TOOLS[0]["function"], "name": "seek"}}]
    cases = [
        (turn, messages, tools)
        for turn in (plain, thought)
        for messages in ([result("a")], [result("b")], [result("a"), result("b", 1)], [QUESTION])
        for tools in (TOOLS, other, [])
    ]
    for _ in range(2):
        for turn, messages, tools in cases:
            end, ids = kept.extend(turn, messages, tools)
            assert (end, ids) == renderer_that_tells().extend(turn, messages, tools)
            ids.clear()  # Callers get their own lists.


def test_a_renderer_keeps_a_limited_number_of_extensions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "_MOST_EXTENSIONS", 3)
    renderer = renderer_of("qwen3")
    turn = AssistantMessage(text="x", content="x")
    for number in range(5):
        renderer.extend(turn, [result(str(number))], TOOLS)
    assert len(renderer._extensions) == 3


def test_a_text_that_is_too_long_for_sure_is_found_without_tokenizing_it() -> None:
    renderer, longest = renderer_of("qwen25"), len("<|endoftext|>")
    limit = render._SHORT_TEXT // longest
    most = render._MOST_NORMALIZED * longest * limit
    assert not renderer.surely_longer([result("x" * render._SHORT_TEXT)], 0)
    assert not renderer.surely_longer([result("x" * most)], limit)
    assert renderer.surely_longer([result("x" * most), result("x", 1)], limit)


def test_long_answers_are_not_kept() -> None:
    renderer, turn = renderer_of("qwen25"), AssistantMessage(text="x", content="x")
    for length, kept in ((render._LONGEST_EXTENSION, 0), (9, 1)):
        end, ids = renderer.extend(turn, [{"role": "user", "content": "x" * length}])
        assert (end, len(ids) > length) == (renderer.end_token_ids[0], True)
        assert len(renderer._extensions) == kept
