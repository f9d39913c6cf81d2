"""Renders messages as token ids, and parses the turns of the policy.

    prompt(messages, tools)          the ids of a conversation, up to the generation prompt
    extend(last, messages, tools)    the ids of new messages, to append after a turn of the policy,
                                     and the token that ends a turn
    parse(ids, tools)                text, reasoning and tool calls of a turn

The ids of the policy's turns are never decoded and tokenized again. New messages are rendered after
a synthetic conversation with one turn of the same form, and the text after this turn is taken. So
earlier turns stay as they were sampled, whatever the template does to them in a whole conversation.
Control tokens in the text of messages are encoded as plain text. Knows templates and tokenizers,
not engines. Called by `rollout.episode`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slipstream.data.chat_template import ChatTemplateError, apply_chat_template
from slipstream.data.end_tokens import end_token_ids
from slipstream.data.messages import with_text
from slipstream.environment.protocol import AssistantMessage, ToolCall, ToolSchema
from slipstream.errors import DataError
from slipstream.rollout.formats.protocol import CallFormat
from slipstream.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_QUESTION, _ANSWER, _REASON = "question 4171", "answer 8263", "reason 6352"
_RESULT = "result 5193"
"""Texts of the synthetic conversation, which no template contains."""

_MOST_EXTENSIONS = 1024
"""The number of extensions that a renderer keeps."""

_LONGEST_EXTENSION = 4096
"""The number of tokens of the longest extension that it keeps: all of them take some 200 MB."""

_SHORT_TEXT = 100_000
"""Characters of messages that are tokenized in any case. A tokenizer needs some 50 ms for them."""

_MOST_NORMALIZED = 4
"""A tokenizer's normalization, such as NFC, makes one character of at most this many."""

_OUTSIDE = ("user", "tool")
"""Roles whose text comes from outside. System and assistant messages may contain control tokens."""

_CUSTOM = "actor_rollout_ref.model.custom_chat_template"


class Renderer:
    """Renders and parses for one tokenizer and its chat template."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        call_format: CallFormat,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """`template_kwargs` are variables of the template. Raises DataError if the template writes
        no token that ends a turn."""
        self.call_format = call_format
        self._tokenizer = tokenizer
        self._options = dict(template_kwargs or {})
        ends = list(end_token_ids(tokenizer, self._options))
        unknown = tokenizer.unk_token_id
        for token in call_format.stop_tokens:
            found = tokenizer.convert_tokens_to_ids(token)
            if isinstance(found, int) and found != unknown and found not in ends:
                ends.append(found)
        self.end_token_ids: tuple[int, ...] = tuple(ends)
        """Tokens that end a turn of the policy."""
        if not ends:
            raise DataError(
                "the tokenizer has no token that ends a turn; set its eos_token, or set "
                f"{_CUSTOM} to a template whose turns end with a special token"
            )
        self._extensions: dict[tuple[object, ...], tuple[int, list[int], Sequence[ToolSchema]]] = {}
        self._ends_known: dict[tuple[object, ...], bool] = {}
        self._end_texts = {str(tokenizer.convert_ids_to_tokens(i)): i for i in ends}
        control = {str(token) for token in tokenizer.added_tokens_decoder.values()}
        # Some tokenizers have runs of white space as added tokens, which are no control tokens.
        named = sorted((token for token in control if token.strip()), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, named))) if named else None
        self._longest_token: int | None = None
        """Characters of the longest token, once it is needed."""

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> list[int]:
        """Return the ids of a conversation, with the generation prompt at its end."""
        protected, literals = self._protect(messages)
        return self._encode(self._render(protected, tools), literals)

    def extend(
        self,
        last: AssistantMessage,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
    ) -> tuple[int, list[int]]:
        """Return the token that ends the policy's turn `last`, and the ids of `messages` and of the
        next generation prompt, to append after this token.

        A template that allows only one tool result gets all results as one. Raises DataError if the
        template fails, or writes no end token after a turn.
        """
        # The samples of a group often get equal answers. The tools are kept, so that no other ones
        # can have their identity.
        key = (last.reasoning is None, repr(messages), tuple(map(id, tools)))
        if key not in self._extensions:
            end, ids = self._extension(last, messages, tools)
            if len(ids) > _LONGEST_EXTENSION:
                return end, ids
            if len(self._extensions) == _MOST_EXTENSIONS:
                del self._extensions[next(iter(self._extensions))]
            self._extensions[key] = end, ids, tools
        end, ids, _ = self._extensions[key]
        return end, [*ids]

    def _extension(
        self, last: AssistantMessage, messages: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> tuple[int, list[int]]:
        protected, literals = self._protect(messages)
        try:
            text = self._render([*_synthetic(last, protected), *protected], tools)
        except ChatTemplateError:
            if (joined := _joined(protected)) is None:
                raise
            text = self._render([*_synthetic(last, joined), *joined], tools)
        found = self._first_end(text)
        if found is None or not self._ends_before(last, protected, tools):
            raise DataError(
                "the chat template writes no end token after an assistant turn that "
                f"{'tool results follow' if last.tool_calls else 'a message follows'}; set "
                f"{_CUSTOM} to a template that does"
            )
        at, end = found
        # Encoded after the end token, because some tokenizers write a space at the start of a text.
        ids = self._encode(text[at:], literals)
        if not ids or ids[0] != self._end_texts[end]:
            raise DataError(
                f"the tokenizer does not encode {end!r} as one token, so turns cannot be appended "
                f"to each other; set {_CUSTOM} to a template whose turns end with a special token"
            )
        return ids[0], ids[1:]

    def _first_end(self, text: str) -> tuple[int, str] | None:
        """The first end token after the synthetic answer, with its place; None if there is none."""
        place = text.find(_ANSWER)
        found = [(text.find(end, place), end) for end in self._end_texts if place >= 0]
        return min(((at, end) for at, end in found if at >= 0), default=None)

    def _ends_before(
        self, last: AssistantMessage, messages: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> bool:
        """Return whether the end token of a turn comes before the messages after it. Without one,
        the first end token is that of a message, whose text would be lost."""
        shape = (*(str(message.get("role")) for message in messages), last.reasoning is None)
        if messages and shape not in self._ends_known:
            marked = [{**messages[0], "content": _RESULT}, *messages[1:]]
            try:
                text = self._render([*_synthetic(last, marked), *marked], tools)
            except ChatTemplateError:
                marked = _joined(marked) or marked
                text = self._render([*_synthetic(last, marked), *marked], tools)
            found = self._first_end(text)
            self._ends_known[shape] = found is not None and found[0] < text.find(_RESULT)
        return self._ends_known.get(shape, True)

    def surely_longer(self, messages: Sequence[Message], limit: int) -> bool:
        """Return whether a long text has more than `limit` tokens for sure, without tokenizing it.

        Tokenizing takes seconds for 10 MB, in which no other episode continues.
        """
        texts = [message.get("content") for message in messages]
        characters = sum(len(text) for text in texts if isinstance(text, str))
        if characters <= _SHORT_TEXT:
            return False
        if self._longest_token is None:
            self._longest_token = max(map(len, self._tokenizer.get_vocab()))
        return characters > _MOST_NORMALIZED * self._longest_token * limit

    def same_text(self, left: Sequence[int], right: Sequence[int]) -> bool:
        """Return whether two lists of ids have the same text, control tokens included."""
        decode = self._tokenizer.decode
        return list(left) == list(right) or str(decode(left)) == str(decode(right))

    def parse(self, ids: Sequence[int], tools: Sequence[ToolSchema] = ()) -> AssistantMessage:
        """Parse a turn of the policy. `ids` may end with an end token."""
        kept = list(ids[:-1] if ids and ids[-1] in self.end_token_ids else ids)
        text = str(self._tokenizer.decode(kept, skip_special_tokens=False))
        parsed = self.call_format.parse(text, tools)
        return AssistantMessage(
            text=text,
            content=parsed.content,
            reasoning=parsed.reasoning,
            tool_calls=tuple(parsed.calls),
        )

    def check(self, tools: Sequence[ToolSchema], *, results: bool) -> None:
        """Raise DataError if turns cannot be appended: after tool results if `results`, else after
        messages of a user."""
        call = ToolCall(id="call00000", name="tool", arguments={"value": "x"})
        calls = (call,) if results else ()
        turn = AssistantMessage(text="x", content="" if results else "x", tool_calls=calls)
        answer: Message = {"role": "user", "content": "x"}
        if results:
            answer = {"role": "tool", "tool_call_id": call.id, "name": "tool", "content": "x"}
        self.extend(turn, [answer], tools)

    def appends(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> bool:
        """Return whether a conversation that ends with a message for the policy has the same text
        turn by turn as in the template's whole rendering."""
        turns = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        ids = self._encode(self._render(messages[: turns[0]], tools), {})
        for turn, following in zip(turns, [*turns[1:], len(messages)], strict=True):
            opened = self._render(messages[:turn], tools)
            closed = self._render(messages[: turn + 1], tools, more=False)
            ends = [closed.rfind(end) + len(end) for end in self._end_texts if end in closed]
            if not closed.startswith(opened) or not ends or max(ends) <= len(opened):
                return False
            written = self._encode(closed[len(opened) : max(ends)], {})
            parsed = self.parse(written, tools)
            _, added = self.extend(parsed, messages[turn + 1 : following], tools)
            ids += [*written, *added]
        # Texts, because tokens of the whole text may cross the end of the generation prompt.
        whole = self._encode(self._render(messages, tools), {})
        return self.same_text(ids, whole)

    def _render(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, more: bool = True
    ) -> str:
        return str(
            apply_chat_template(
                self._tokenizer,
                list(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=more,
                **self._options,
            )
        )

    def _protect(self, messages: Sequence[Message]) -> tuple[list[Message], dict[str, str]]:
        """Replace control tokens in what users and tools say by marks.

        Returns the messages, and the control tokens by mark.
        """
        cleaned = [_cleaned(message) for message in messages]
        texts = [
            message["content"] if message.get("role") in _OUTSIDE else "" for message in cleaned
        ]
        control = self._control
        if control is None or not any(map(control.search, texts)):
            return cleaned, {}
        salt = 0
        while any(f"mark{salt}x" in text for text in texts):
            salt += 1
        literals: dict[str, str] = {}

        def mark(match: re.Match[str]) -> str:
            name = f"mark{salt}x{len(literals)}x"
            literals[name] = match[0]
            return name

        protected = [
            {**message, "content": control.sub(mark, text)} if text else message
            for message, text in zip(cleaned, texts, strict=True)
        ]
        return protected, literals

    def _encode(self, text: str, literals: Mapping[str, str]) -> list[int]:
        ids: list[int] = []
        for piece in _pieces(text, literals):
            encoded = self._tokenizer(piece, add_special_tokens=False)["input_ids"]
            ids += [int(i) for i in encoded]
        return ids


def _pieces(text: str, literals: Mapping[str, str]) -> Iterator[str]:
    """Split a text so that none of its `literals` is a control token when the pieces are encoded
    one by one: a literal is cut after its first character."""
    if not literals:
        yield text
        return
    for part in re.split(f"({'|'.join(map(re.escape, literals))})", text):
        if part in literals:
            yield literals[part][:1]
            yield literals[part][1:]
        elif part:
            yield part


def _cleaned(message: Message) -> Message:
    """The message with a text as content, in which unpaired surrogates, which no tokenizer encodes,
    are replaced."""
    text = with_text(message, "a message of the environment")["content"]
    return {**message, "content": text.encode("utf-8", "replace").decode("utf-8")}


def _joined(messages: Sequence[Message]) -> list[Message] | None:
    """The messages with all leading tool results as one; None if there are fewer than two."""
    results = _results(messages)
    if results < 2:
        return None
    text = "\n".join(message["content"] for message in messages[:results])
    return [{**messages[0], "content": text}, *messages[results:]]


def _results(messages: Sequence[Message]) -> int:
    """The number of leading tool results."""
    roles = [message.get("role") == "tool" for message in messages]
    return roles.index(False) if False in roles else len(roles)


def _synthetic(last: AssistantMessage, following: Sequence[Message]) -> list[Message]:
    """A question, and an answer of the form of `last`, with as many calls as tool results follow.

    A known text ends the answer: its content, or the argument of each call.
    """
    results = _results(following)
    reasoning = None if last.reasoning is None else _REASON
    answer = AssistantMessage(text="", content=_ANSWER, reasoning=reasoning)
    message = answer.as_message()
    if results:
        message["content"] = ""
        message["tool_calls"] = [
            {
                "id": str(result.get("tool_call_id") or f"call{number:05d}"),
                "type": "function",
                "function": {
                    "name": str(result.get("name") or "tool"),
                    "arguments": {"value": _ANSWER},
                },
            }
            for number, result in enumerate(following[:results])
        ]
    return [{"role": "user", "content": _QUESTION}, message]
