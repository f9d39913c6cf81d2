"""Checks which conversations a chat template renders otherwise than turn by turn.

An episode appends to its tokens. A template may change earlier turns in a whole conversation, for
example drop their reasoning. Then the context of an episode differs from what the template would
write, and from what other systems train on. The check names such conversations at the start of a
run. Called by `run.context`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream.data.chat_template import ChatTemplateError
from slipstream.environment.protocol import ToolSchema
from slipstream.errors import DataError
from slipstream.rollout.render import Renderer
from slipstream.types import Message

_USER: Message = {"role": "user", "content": "question 1"}
_MORE: Message = {"role": "user", "content": "question 2"}


def _call(number: int = 0) -> dict[str, Any]:
    function = {"name": "tool", "arguments": {"value": f"v{number}"}}
    return {"id": f"call{number:05d}", "type": "function", "function": function}


def _turn(content: str = "", calls: int = 0, reasoning: str | None = None) -> Message:
    turn: Message = {"role": "assistant", "content": content}
    if calls:
        turn["tool_calls"] = [_call(number) for number in range(calls)]
    if reasoning is not None:
        turn["reasoning_content"] = reasoning
    return turn


def _result(text: str = "result", number: int = 0) -> Message:
    name = f"call{number:05d}"
    return {"role": "tool", "tool_call_id": name, "name": "tool", "content": text}


CONVERSATIONS: dict[str, list[Message]] = {
    "a tool result": [_USER, _turn(calls=1), _result()],
    "text before a call": [_USER, _turn("so", calls=1), _result()],
    "two tool results": [_USER, _turn(calls=2), _result(), _result("other", 1)],
    "two turns with tools": [_USER, _turn(calls=1), _result(), _turn(calls=1), _result("more")],
    "a second question": [_USER, _turn("answer"), _MORE],
    "a second question after tools": [_USER, _turn(calls=1), _result(), _turn("answer"), _MORE],
    "reasoning before a tool result": [_USER, _turn(calls=1, reasoning="why"), _result()],
    "reasoning before a second question": [_USER, _turn("answer", reasoning="why"), _MORE],
    "a system message": [{"role": "system", "content": "rules"}, _USER, _turn("answer"), _MORE],
    "unicode and spaces": [_USER, _turn(calls=1), _result("  é\n\n日本  ")],
    "an empty result": [_USER, _turn(calls=1), _result("")],
}
"""Conversations by what is special about them."""


def changed_conversations(
    renderer: Renderer, tools: Sequence[ToolSchema], *, results: bool
) -> list[str]:
    """Return the names of the conversations whose appended tokens differ from the template's whole
    rendering. With `results` False, conversations with tool results are left out.

    A conversation that the template refuses, or whose turns it does not write after the generation
    prompt, counts as changed.
    """
    names = []
    for name, messages in CONVERSATIONS.items():
        if not results and any(message["role"] == "tool" for message in messages):
            continue
        try:
            same = renderer.appends(messages, tools)
        except (ChatTemplateError, DataError):
            same = False
        if not same:
            names.append(name)
    return names
