"""Templates that ignore a message are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.data.datasets import load_prompts
from slipstream.data.sft import load_sft_samples
from slipstream.data.template_check import check_conversation_renders, check_template_renders
from slipstream.errors import DataError
from tests.data.helpers import CHATML, STYLES, byte_tokenizer, char_tokenizer, ids

KNOWN_ROLES = (
    "{% for m in messages %}{% if m['role'] in ('user', 'assistant') %}<s>{{ m['role'] }}:"
    "{{ m['content'] }}<e>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
REMEDY = r"actor_rollout_ref\.model\.custom_chat_template"


def turns(*roles: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": "a"} for role in roles]


@pytest.mark.parametrize(
    "template",
    [
        "mine.jinja",
        "<s>user:<e>\n<s>assistant:",
        "{{ messages | length }}",
        "{% for m in messages %}{{ m['role'] }}: {{ m['text'] }}{% endfor %}",
        "{% if messages[0]['role'] != 'system' %}{{ raise_exception('x') }}{% endif %}"
        "{{ messages[0]['content'] }}",
    ],
)
def test_a_template_that_ignores_the_question_is_refused(template: str) -> None:
    with pytest.raises(DataError, match=rf"T: .* user message.*{REMEDY}"):
        check_template_renders(char_tokenizer(template), "T")


@pytest.mark.parametrize(
    "template",
    [
        CHATML,
        "{{ messages[0]['content'] }} !",
        "{{ messages[-1]['content'] | trim }}",
        "{{ raise_exception('I need tools') }}",
        *STYLES.values(),
    ],
)
def test_other_templates_are_accepted(template: str) -> None:
    check_template_renders(char_tokenizer(template), "T")


def test_options_reach_the_template() -> None:
    tokenizer = char_tokenizer("{{ messages[0]['content'] if loud is defined else '' }}")
    check_template_renders(tokenizer, "T", {"loud": True})
    with pytest.raises(DataError, match=REMEDY):
        check_template_renders(tokenizer, "T")


@pytest.mark.parametrize(
    ("template", "roles", "message", "role"),
    [
        (KNOWN_ROLES, ("human",), 0, "human"),
        (KNOWN_ROLES, ("system", "user"), 0, "system"),
        (KNOWN_ROLES, ("user", "assistant", "Human", "gpt"), 2, "Human"),
        ("{{ messages[0]['content'] }}", ("user", "assistant", "user"), 1, "assistant"),
        ("{{ messages[-1]['content'] }}", ("user", "assistant", "user"), 0, "user"),
    ],
)
def test_an_ignored_message_is_named(
    template: str, roles: tuple[str, ...], message: int, role: str, tmp_path: Path
) -> None:
    tokenizer = char_tokenizer(template)
    check_conversation_renders(tokenizer, turns("user"), "x")
    path = tmp_path / "a.jsonl"
    rows = [{"prompt": turns("user")}, {"prompt": turns(*roles)}]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    where = rf"a\.jsonl, row 1: .* message {message} \(role '{role}'\).*{REMEDY}"
    with pytest.raises(DataError, match=where):
        load_prompts(path, tokenizer, max_prompt_length=99)


def test_an_ignored_message_of_a_demonstration_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": turns("system", "user", "assistant")}))
    with pytest.raises(
        DataError, match=rf"a\.jsonl, row 0: .* message 0 \(role 'system'\).*{REMEDY}"
    ):
        load_sft_samples(path, char_tokenizer(KNOWN_ROLES))
    path.write_text(json.dumps({"messages": turns("user", "assistant")}))
    (sample,) = load_sft_samples(path, char_tokenizer(KNOWN_ROLES))
    assert sample.tokens == ids("<s>user:a<e>\n<s>assistant:a<e>\n")


def test_templates_may_drop_reasoning_and_the_text_beside_tool_calls() -> None:
    template = (
        "{% for m in messages %}<s>{{ m['role'] }}:{% if m['tool_calls'] %}"
        "{{ m['tool_calls'][0]['function']['name'] }}{% else %}"
        "{{ m['content'].split('</think>')[-1] }}{% endif %}<e>{% endfor %}"
    )
    call = {"function": {"name": "add", "arguments": {}}}
    messages = [
        *turns("user"),
        {"role": "assistant", "content": "<think>b</think>a"},
        *turns("user"),
        {"role": "assistant", "content": "I add", "tool_calls": [call]},
    ]
    check_conversation_renders(char_tokenizer(template), messages, "x")


def test_a_template_that_fails_on_other_texts_is_not_judged() -> None:
    template = "{% if 'a' != messages[0]['content'] %}{{ raise_exception('x') }}{% endif %}b"
    check_conversation_renders(char_tokenizer(template), turns("user"), "x")


def test_public_styles_render_each_message() -> None:
    for style, template in STYLES.items():
        roles = ["user", "assistant", "user"]
        if style == "needs_system":
            roles.insert(0, "system")
        check_conversation_renders(byte_tokenizer([], template), turns(*roles), style)
