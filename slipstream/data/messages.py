"""Reads chat messages in the forms of public data sets, and returns them with texts as contents.

Knows messages, not files or templates. Called by `rows`, `conversation`, `datasets` and
`training.reward_model`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.errors import DataError
from slipstream.reading import shown
from slipstream.types import Message

_TEXT_TYPES = (None, "text", "input_text", "output_text")
_WITHOUT_TEXT = ("tool_calls", "reasoning_content", "reasoning", "thinking")
"""Fields with which a message may lack a content."""


def with_text(message: Mapping[str, Any], where: str) -> Message:
    """Return a message whose content is text.

    A content of text parts is joined without separators, as transformers' own templates do. A
    missing or null content is "" if the message calls tools or has only reasoning. Raises
    DataError, naming `where`, for numbers and other values, and for images, audio and videos.
    """
    calls = message.get("tool_calls")
    listed = isinstance(calls, list | tuple) and all(isinstance(call, Mapping) for call in calls)
    if calls is not None and not listed:
        raise DataError(
            f"{where}: 'tool_calls' must be a list of objects, got {shown(calls, 80)}; write them "
            "as OpenAI's API does, or remove them"
        )
    content: Any = message.get("content")
    # A column of a data set class may hold arrays.
    content = content.tolist() if hasattr(content, "tolist") else content
    if isinstance(content, list | tuple) and content:
        texts = [_part(part, f"{where}, part {number}") for number, part in enumerate(content)]
        return {**message, "content": "".join(texts)}
    if content is None and any(message.get(key) for key in _WITHOUT_TEXT):
        return {**message, "content": ""}
    if not isinstance(content, str):
        raise DataError(
            f"{where}: 'content' must be text, got {type(content).__name__} {shown(content, 80)}; "
            "write it as text, or remove the message"
        )
    return dict(message)


def continues_message(messages: str | Sequence[Message]) -> bool:
    """Return whether a response continues the last message, which is one of the assistant."""
    return not isinstance(messages, str) and messages[-1].get("role") == "assistant"


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise DataError(
            f"{where}: a part of a content must be text or an object with 'type' and 'text', got "
            f"{shown(part, 80)}"
        )
    kind, text = part.get("type"), part.get("text")
    if kind not in _TEXT_TYPES or (kind is None and text is None):
        name = kind or next((key for key, value in part.items() if value is not None), "empty")
        raise DataError(
            f"{where} is {shown(name)}, and models here read text only; remove the part, or the row"
        )
    if not isinstance(text, str):
        raise DataError(f"{where}: 'text' must be text, got {shown(text, 80)}; remove the part")
    return text
