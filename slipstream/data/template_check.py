"""Checks that a chat template renders the text of every message.

A template that ignores a message gives different conversations the same prompt, and training on it
goes wrong without an error. Examples are a template that is only a file's name, and a role that
the template does not know. Knows tokenizers and messages, not files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from slipstream.data.chat_template import ChatTemplateError, apply_chat_template
from slipstream.errors import DataError
from slipstream.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CUSTOM = "set actor_rollout_ref.model.custom_chat_template to a template that renders it"

_checked: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()


def check_template_renders(
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    template_kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Raise DataError if two different questions of a user have the same prompt.

    `source` names the tokenizer. A template that fails on a plain question is accepted: it may need
    other messages.
    """
    question = {"role": "user", "content": "-"}
    for messages in ([question], [{"role": "system", "content": "-"}, question]):
        missing = _missing(tokenizer, messages, None, template_kwargs or {})
        if missing is not None:
            break
    if missing:
        raise DataError(
            f"{source}: the chat template does not render the text of a {missing[0][1]} message, "
            f"so different prompts become the same text; {_CUSTOM}"
        )


def check_conversation_renders(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    where: str,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Raise DataError, naming `where`, if the chat template ignores one of the messages.

    The check replaces the texts by others, so it runs only once for conversations with the same
    roles and fields. Nothing is raised if the template fails on such texts.
    """
    options = template_kwargs or {}
    key = repr(
        (
            getattr(tokenizer, "chat_template", None),
            tools,
            sorted(options.items()),
            list(map(_form, messages)),
        )
    )
    checked = _checked.setdefault(tokenizer, set())
    if key in checked:
        return
    for number, role, what in _missing(tokenizer, messages, tools, options) or []:
        raise DataError(
            f"{where}: the chat template does not render the {what} of message {number} (role "
            f"{role!r}); give the message a role that the template knows, such as user, or "
            f"{_CUSTOM}"
        )
    checked.add(key)


def _form(message: Message) -> tuple[Any, ...]:
    filled = sorted(key for key, value in message.items() if value)
    return (message.get("role"), filled, len(message.get("tool_calls") or []))


def _missing(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    template_kwargs: Mapping[str, Any],
) -> list[tuple[int, str, str]] | None:
    """Return number, role and kind of the texts that the template ignores; None if it fails."""
    marks: dict[str, tuple[int, str, str]] = {}

    def mark(number: int, role: str, what: str) -> str:
        text = f"text-{len(marks)}-of-trial"
        marks[text] = (number, role, what)
        return text

    marked = []
    for number, message in enumerate(messages):
        role, content = str(message["role"]), message.get("content")
        changed = dict(message)
        if message.get("tool_calls"):
            # Llama 3.1's template and others render either calls or text.
            changed["tool_calls"] = [
                _renamed(call, mark(number, role, "tool call")) for call in message["tool_calls"]
            ]
        elif isinstance(content, str) and content.strip():
            changed["content"] = mark(number, role, "text")
        marked.append(changed)
    try:
        text = str(
            apply_chat_template(
                tokenizer,
                marked,
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=messages[-1]["role"] != "assistant",
                **template_kwargs,
            )
        )
    except ChatTemplateError:
        return None
    return [place for words, place in marks.items() if words not in text]


def _renamed(call: Any, name: str) -> Any:
    """Return a tool call of OpenAI's form, or its inner object, with another function name."""
    if not isinstance(call, Mapping):
        return call
    inner = call.get("function")
    if isinstance(inner, Mapping):
        return {**call, "function": {**inner, "name": name}}
    return {**call, "name": name}
