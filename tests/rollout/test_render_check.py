"""The check of chat templates at the start of a run."""

from __future__ import annotations

import pytest

from slipstream.data.lookup import build_tokenizer
from slipstream.rollout.formats.registry import format_of_template
from slipstream.rollout.render import Renderer
from slipstream.rollout.render_check import CONVERSATIONS, changed_conversations
from tests.rollout.test_render import TOOLS
from tests.rollout.tool_templates import tool_tokenizer

SECOND = ["a second question", "a second question after tools"]
REASONING = "reasoning before a second question"


@pytest.mark.parametrize(
    ("family", "changed"),
    [
        ("qwen25", []),
        # It writes an empty block of reasoning into the last turn only.
        ("qwen3", [name for name in CONVERSATIONS if name != "reasoning before a tool result"]),
        # It allows only single calls.
        ("llama31", ["two tool results"]),
        # It moves the list of tools to the last question.
        ("mistral", [*SECOND, REASONING, "a system message"]),
    ],
)
def test_templates_that_change_earlier_turns_are_named(family: str, changed: list[str]) -> None:
    tokenizer = tool_tokenizer(family)
    renderer = Renderer(tokenizer, format_of_template(tokenizer.chat_template))
    assert changed_conversations(renderer, TOOLS, results=True) == changed


def test_the_lookup_task_only_appends() -> None:
    tokenizer = build_tokenizer()
    renderer = Renderer(tokenizer, format_of_template(tokenizer.chat_template))
    assert changed_conversations(renderer, [], results=True) == []


def test_without_tools_only_conversations_without_results_are_checked() -> None:
    tokenizer = tool_tokenizer("qwen3")
    renderer = Renderer(tokenizer, format_of_template(tokenizer.chat_template))
    names = changed_conversations(renderer, [], results=False)
    assert names == ["a second question", REASONING, "a system message"]
