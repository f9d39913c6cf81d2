"""Turns of the policy as chat messages."""

from __future__ import annotations

from slipstream.environment.protocol import AssistantMessage, ToolCall


def test_a_turn_becomes_a_message_of_transformers() -> None:
    calls = (ToolCall(id="a", name="f", arguments={"x": 1}), ToolCall(id="b", problem="broken"))
    turn = AssistantMessage(text="", content="so", reasoning="why", tool_calls=calls)
    function = {"name": "f", "arguments": {"x": 1}}
    assert turn.as_message() == {
        "role": "assistant",
        "content": "so",
        "reasoning_content": "why",
        "tool_calls": [{"id": "a", "type": "function", "function": function}],
    }


def test_a_turn_without_calls_has_only_content() -> None:
    assert AssistantMessage(text="so", content="so").as_message() == {
        "role": "assistant",
        "content": "so",
    }


def test_a_recorded_turn_does_not_share_the_arguments_of_its_calls() -> None:
    call = ToolCall(id="a", name="f", arguments={"x": [1]})
    message = AssistantMessage(text="", tool_calls=(call,)).as_message()
    call.arguments["x"].append(2)
    assert message["tool_calls"][0]["function"]["arguments"] == {"x": [1]}
