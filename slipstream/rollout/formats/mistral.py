"""The formats of Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, and since 2025
`[TOOL_CALLS]NAME[ARGS]{...}`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from slipstream.environment.protocol import ToolSchema
from slipstream.rollout.formats.protocol import Calls, ParsedText, loads, split_reasoning

_TAG = "[TOOL_CALLS]"
_NAMED = re.compile(r"([^\[\]{}\s]+)\s*(?:\[CALL_ID\][^\[\]]*)?\[ARGS\](.*)\Z", re.DOTALL)


class MistralFormat:
    """`CallFormat` of calls behind `[TOOL_CALLS]`."""

    name = "mistral"
    stop_tokens: tuple[str, ...] = ()

    def written_by(self, template: str) -> bool:
        return _TAG in template

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> ParsedText:
        reasoning, rest = split_reasoning(text, "[THINK]", "[/THINK]")
        content, *parts = rest.split(_TAG)
        calls, kept = Calls(), [content]
        for part in parts:
            before = len(calls.found)
            if (named := _NAMED.match(part.strip())) is not None:
                _add_named(calls, named[1], named[2])
            else:
                _add_list(calls, part.strip())
            if any(call.problem is not None for call in calls.found[before:]):
                kept.append(_TAG + part)
        return ParsedText(content="".join(kept).strip(), reasoning=reasoning, calls=calls.found)


def _add_named(calls: Calls, name: str, text: str) -> None:
    try:
        calls.add(name, loads(text))
    except ValueError as error:
        calls.fail(f"the arguments are not valid JSON: {error}", name=name)


def _add_list(calls: Calls, text: str) -> None:
    try:
        listed = loads(text)
    except ValueError as error:
        calls.fail(f"the tool calls are not valid JSON: {error}")
        return
    if not isinstance(listed, list) or not listed:
        calls.fail("the tool calls must be a JSON list of objects")
        return
    for call in listed:
        if isinstance(call, dict):
            calls.add(call.get("name"), call.get("arguments", {}))
        else:
            calls.fail("a tool call must be a JSON object")
