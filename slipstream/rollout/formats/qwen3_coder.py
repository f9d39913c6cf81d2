"""The format of Qwen3-Coder, Qwen3.5 and Qwen3.6: `<tool_call>` with `<function=NAME>` and
`<parameter=NAME>` tags, whose values have no JSON quotes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.environment.protocol import ToolSchema
from slipstream.rollout.formats.protocol import (
    Calls,
    ParsedText,
    loads,
    parameter_types,
    split_reasoning,
)

_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\n]*)>(.*?)</function>\s*\Z", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]*)>\n?(.*?)\n?</parameter>", re.DOTALL)


class Qwen3CoderFormat:
    """`CallFormat` of nested tags."""

    name = "qwen3_coder"
    stop_tokens: tuple[str, ...] = ()

    def written_by(self, template: str) -> bool:
        return "<function=" in template and "<parameter=" in template

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> ParsedText:
        reasoning, rest = split_reasoning(text)
        calls, kept, done = Calls(), list[str](), 0
        for match in _CALL.finditer(rest):
            kept.append(rest[done : match.start()])
            done = match.end()
            function = _FUNCTION.match(match[1].strip())
            if not match[2]:
                calls.fail("a tool call has no </tool_call>")
            elif function is None:
                calls.fail("a tool call needs <function=NAME> and </function>")
            else:
                _add(calls, function[1].strip(), function[2], tools)
            if calls.found[-1].problem is not None:
                kept.append(match[0])
        kept.append(rest[done:])
        return ParsedText(content="".join(kept).strip(), reasoning=reasoning, calls=calls.found)


def _add(calls: Calls, name: str, body: str, tools: Sequence[ToolSchema]) -> None:
    between = _PARAMETER.sub("", body)
    if between.strip():
        calls.fail(f"unexpected text between parameters: {between.strip()[:80]!r}", name=name)
        return
    schemas = parameter_types(tools, name)
    arguments = {}
    for match in _PARAMETER.finditer(body):
        key = match[1].strip()
        arguments[key] = _typed(match[2], schemas.get(key))
    calls.add(name, arguments)


def _typed(text: str, schema: Any) -> Any:
    """Convert a value to the type of its schema. It stays a text if it has another type, and if the
    schema allows texts."""
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list) or "string" in kinds:
        return text
    try:
        return loads(text)
    except ValueError:
        return text
