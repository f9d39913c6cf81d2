"""The interface of call formats, and helpers that several of them use."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from slipstream.environment.protocol import ToolCall, ToolSchema


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedText:
    """The text of a turn, split into its parts. `content` also has the text of the calls that could
    not be parsed, so that it is not lost if the turn is rendered again."""

    content: str
    reasoning: str | None = None
    calls: Sequence[ToolCall] = ()


class CallFormat(Protocol):
    """Parses turns of one format. It has no state."""

    name: str
    stop_tokens: tuple[str, ...]
    """Tokens that end a turn, in addition to the end tokens of tokenizer and template."""

    def written_by(self, template: str) -> bool:
        """Whether a chat template writes calls in this format."""
        ...

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> ParsedText:
        """Split the text of a turn, without its end token. Never raises: a call that cannot be
        parsed has a `problem`."""
        ...


@dataclass(slots=True)
class Calls:
    """Collects the calls of one turn and numbers them."""

    found: list[ToolCall] = field(default_factory=list)

    def add(self, name: object, arguments: object, *, arguments_key: str = "arguments") -> None:
        """Add a call, or one with a problem if name or arguments have a wrong type."""
        if not isinstance(name, str) or not name:
            self.fail('a tool call needs a "name" that is a text')
        elif not isinstance(arguments, Mapping):
            self.fail(f'"{arguments_key}" must be a JSON object', name=name)
        else:
            self.found.append(ToolCall(id=self._next_id(), name=name, arguments=dict(arguments)))

    def add_json(self, text: str, *, arguments_key: str = "arguments") -> bool:
        """Add the call of a JSON object with name and arguments. Returns whether it is one."""
        try:
            call = loads(text)
        except ValueError as error:
            self.fail(f"the tool call is not valid JSON: {error}")
            return False
        if not isinstance(call, Mapping):
            self.fail("a tool call must be a JSON object")
            return False
        self.add(call.get("name"), call.get(arguments_key, {}), arguments_key=arguments_key)
        return self.found[-1].problem is None

    def fail(self, problem: str, *, name: str = "") -> None:
        """Add a call that could not be parsed."""
        self.found.append(ToolCall(id=self._next_id(), name=name, problem=problem))

    def _next_id(self) -> str:
        # Nine letters and digits, because Mistral's templates require that.
        return f"call{len(self.found):05d}"


def loads(text: str) -> Any:
    """Parse JSON. Raises ValueError with a short reason, also for NaN, Infinity, and text that is
    nested too deeply."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def split_reasoning(
    text: str, begin: str = "<think>", end: str = "</think>"
) -> tuple[str | None, str]:
    """Split off the reasoning at the start of a turn. Returns reasoning (None if there is none) and
    the remaining text.

    The start tag may be missing, because some templates write it in the generation prompt.
    Reasoning that does not end leaves no other text.
    """
    before, tag, after = text.partition(end)
    if tag:
        return before.partition(begin)[2].strip() if begin in before else before.strip(), after
    start, tag, rest = text.partition(begin)
    if tag and not start.strip():
        return rest.strip(), ""
    return None, text


def parameter_types(tools: Sequence[ToolSchema], name: str) -> Mapping[str, Any]:
    """The schemas of the parameters of the tool `name`; empty if it is unknown."""
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties")
            return properties if isinstance(properties, Mapping) else {}
    return {}
