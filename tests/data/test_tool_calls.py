"""Conversations with tool calls come in one form; others are refused with a remedy."""

from __future__ import annotations

import re
from typing import Any

import pytest

from slipstream.data.tool_calls import checked_messages, checked_tools
from slipstream.errors import DataError
from tests.data.agent_records import TOOLS, call, conversation

USER = {"role": "user", "content": "q"}


def test_calls_get_objects_as_arguments_and_null_contents_get_texts() -> None:
    checked = checked_messages(conversation(), "f:1")
    assert checked[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call00001",
                "type": "function",
                "function": {"name": "look_up", "arguments": {"name": " ana"}},
            }
        ],
    }
    assert [checked[0], *checked[2:]] == [conversation()[0], *conversation()[2:]]


@pytest.mark.parametrize("arguments", [None, "", " ", "{}", {}])
def test_a_call_without_arguments_has_an_empty_object(arguments: Any) -> None:
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [call("a", arguments)]}]
    (made,) = checked_messages(messages, "f")[1]["tool_calls"]
    assert made["function"]["arguments"] == {}


def test_answers_without_ids_belong_to_the_calls_in_order() -> None:
    function = {"name": "f", "arguments": {}}
    calls = {"role": "assistant", "content": "", "tool_calls": [function, {"function": function}]}
    answer = {"role": "tool", "content": "a"}
    checked = checked_messages([USER, calls, answer, answer], "f")
    assert [one["function"] for one in checked[1]["tool_calls"]] == [function, function]
    with pytest.raises(DataError, match="message 4 is the answer of a tool, but"):
        checked_messages([USER, calls, answer, answer, answer], "f")


def test_an_id_may_be_used_again_in_a_later_message() -> None:
    turn = conversation()[1:3]
    assert len(checked_messages([USER, *turn, *turn], "f")) == 5


ANSWERED = conversation()[:3]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "f:1: must be a non-empty list of messages, got []"),
        ("text", "f:1: must be a non-empty list of messages, got 'text'"),
        ([USER, "a"], "f:1, message 1 must be an object with 'role' and 'content', got 'a'"),
        (
            [USER, {"role": "asistant", "content": ""}],
            "f:1, message 1: the role 'asistant' is unknown; did you mean assistant?; use one of",
        ),
        ([{"from": "human", "value": "q"}], "f:1, message 0: the role None is unknown; use one of"),
        ([USER], "f:1: no message of the assistant; add one, or remove the record"),
        ([{"role": "assistant", "content": "a"}], "it has no prompt; begin with a system or user"),
        (
            [USER, {"role": "assistant", "content": None}],
            "message 1: 'content' must be text, got NoneType None; write it as text, or remove",
        ),
        (
            [USER, {"role": "assistant", "content": "a", "loss_mask": 2}],
            "message 1: loss_mask must be 0 or 1, got 2",
        ),
        (
            [USER, {"role": "tool", "tool_call_id": "x", "content": "a"}],
            "f:1, message 1 is the answer of a tool, but the assistant message before it has no "
            "unanswered call with the id 'x'; add the call to 'tool_calls', or remove the message",
        ),
        (
            [*ANSWERED, ANSWERED[2]],
            "message 3 is the answer of a tool, but the assistant message before it has no "
            "unanswered call with the id 'call00001'",
        ),
        (
            [USER, {"role": "assistant", "content": "", "tool_calls": [call("a"), call("a")]}],
            "message 1: two tool calls have the id 'a'; give every call of a message an id of its",
        ),
        (
            [USER, {"role": "assistant", "content": "", "tool_calls": [call("a", "{name:")]}],
            "tool call 0: the 'arguments' of look_up must be a JSON object, got '{name:'; correct",
        ),
        (
            [USER, {"role": "assistant", "content": "", "tool_calls": [call("a", "[1]")]}],
            "tool call 0: the 'arguments' of look_up must be a JSON object, got '[1]'; correct",
        ),
        (
            [USER, {"role": "assistant", "content": "", "tool_calls": [{"id": "a"}]}],
            "message 1, tool call 0 names no function, got {'id': 'a'}; write {\"id\"",
        ),
    ],
)
def test_other_conversations_are_refused(messages: Any, message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        checked_messages(messages, "f:1")


def test_tools_are_a_list_of_objects() -> None:
    assert checked_tools(None, "f") == []
    assert checked_tools(TOOLS, "f") == TOOLS
    with pytest.raises(DataError, match=r"f: 'tools' must be a list of objects, got '\[\]'; write"):
        checked_tools("[]", "f")
