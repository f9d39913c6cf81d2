"""The format of Qwen2.5, Qwen3 and Hermes: `<tool_call>{"name": ..., "arguments": {...}}
</tool_call>`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from slipstream.environment.protocol import ToolSchema
from slipstream.rollout.formats.protocol import Calls, ParsedText, split_reasoning

_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)


class HermesFormat:
    """`CallFormat` of JSON objects in `<tool_call>` tags."""

    name = "hermes"
    stop_tokens: tuple[str, ...] = ()

    def written_by(self, template: str) -> bool:
        return "<tool_call>" in template and "<function=" not in template

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> ParsedText:
        reasoning, rest = split_reasoning(text)
        calls, kept, done = Calls(), list[str](), 0
        for match in _CALL.finditer(rest):
            kept.append(rest[done : match.start()])
            done = match.end()
            if not match[2]:
                calls.fail("a tool call has no </tool_call>")
                parsed = False
            else:
                parsed = calls.add_json(match[1].strip())
            if not parsed:
                kept.append(match[0])
        kept.append(rest[done:])
        return ParsedText(content="".join(kept).strip(), reasoning=reasoning, calls=calls.found)
