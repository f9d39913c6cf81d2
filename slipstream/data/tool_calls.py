"""Checks the messages of a finished conversation with tool calls, and returns them in one form.

Knows messages, not tokens or files. Called by `trajectories`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.data.messages import with_text
from slipstream.errors import DataError, did_you_mean
from slipstream.reading import shown
from slipstream.types import Message

ROLES = ("system", "developer", "user", "assistant", "tool")


def checked_messages(messages: Any, where: str) -> list[Message]:
    """Return the messages with texts as contents and objects as arguments of calls.

    Fields that are null are left out. Raises DataError that names `where` and the message for an
    unknown role, for a conversation that begins with the assistant or has no assistant, for a call
    that is not in OpenAI's form, and for an answer of a tool that no call of the assistant message
    before it asked for.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise DataError(f"{where}: must be a non-empty list of messages, got {shown(messages, 80)}")
    checked: list[Message] = []
    unanswered: list[str | None] = []
    for number, message in enumerate(messages):
        place = f"{where}, message {number}"
        if not isinstance(message, Mapping):
            raise DataError(
                f"{place} must be an object with 'role' and 'content', got {shown(message, 80)}"
            )
        role = message.get("role")
        if role not in ROLES:
            hint = did_you_mean(role, ROLES) if isinstance(role, str) else ""
            raise DataError(
                f"{place}: the role {shown(role)} is unknown{hint}; use one of {', '.join(ROLES)}"
            )
        one = with_text({key: x for key, x in message.items() if x is not None}, place)
        if one.get("loss_mask", 1) not in (0, 1):
            raise DataError(f"{place}: loss_mask must be 0 or 1, got {shown(one['loss_mask'])}")
        if role == "assistant":
            one, unanswered = _with_calls(one, place)
        elif role == "tool":
            _answer(one.get("tool_call_id"), unanswered, place)
        checked.append(one)
    roles = [message["role"] for message in checked]
    if "assistant" not in roles:
        raise DataError(f"{where}: no message of the assistant; add one, or remove the record")
    if roles[0] == "assistant":
        raise DataError(
            f"{where}: the first message is one of the assistant, so it has no prompt; begin with "
            "a system or user message"
        )
    return checked


def checked_tools(tools: Any, where: str) -> list[dict[str, Any]]:
    """Return the tools' schemas; an empty list for null. Raises DataError for another form."""
    if tools is None:
        return []
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(
            f"{where}: 'tools' must be a list of objects, got {shown(tools, 80)}; write them as in "
            "OpenAI's API"
        )
    return list(tools)


def _with_calls(message: Message, place: str) -> tuple[Message, list[str | None]]:
    """Return the message with its calls in one form, and the ids of the calls."""
    calls: Sequence[Mapping[str, Any]] = message.get("tool_calls") or ()
    made = [_call(call, f"{place}, tool call {i}") for i, call in enumerate(calls)]
    ids = [call.get("id") for call in made]
    twice = [key for key, count in Counter(ids).items() if key is not None and count > 1]
    if twice:
        raise DataError(
            f"{place}: two tool calls have the id {shown(twice[0])}; give every call of a message "
            "an id of its own"
        )
    return ({**message, "tool_calls": made} if made else message), ids


def _call(call: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return a call in OpenAI's form, with an object as its arguments."""
    function = call.get("function", call)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise DataError(
            f"{place} names no function, got {shown(dict(call), 80)}; write "
            '{"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}'
        )
    given = function.get("arguments")
    arguments = given
    if isinstance(given, str):
        try:
            arguments = json.loads(given) if given.strip() else {}
        except (ValueError, RecursionError):
            arguments = None
    elif given is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise DataError(
            f"{place}: the 'arguments' of {name} must be a JSON object, got {shown(given, 80)}; "
            "correct the text, or remove the record"
        )
    made = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return made if call.get("id") is None else {"id": call["id"], **made}


def _answer(key: Any, unanswered: list[str | None], place: str) -> None:
    """Remove the call that a tool's message answers. A message without an id answers the first."""
    if key is None and unanswered:
        unanswered.pop(0)
    elif key is not None and key in unanswered:
        unanswered.remove(key)
    else:
        raise DataError(
            f"{place} is the answer of a tool, but the assistant message before it has no "
            f"unanswered call{'' if key is None else f' with the id {shown(key)}'}; add the call "
            "to 'tool_calls', or remove the message"
        )
