"""The format of Llama 3.1 and 3.2: the whole turn is `{"name": ..., "parameters": {...}}`."""

from __future__ import annotations

import json
from collections.abc import Sequence

from slipstream.environment.protocol import ToolSchema
from slipstream.rollout.formats.protocol import Calls, ParsedText

_TAG = "<|python_tag|>"


class Llama3JsonFormat:
    """`CallFormat` of turns that are JSON objects, separated by semicolons if there are several."""

    name = "llama3_json"
    stop_tokens: tuple[str, ...] = ("<|eom_id|>",)

    def written_by(self, template: str) -> bool:
        return '"parameters": ' in template and "<|start_header_id|>" in template

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> ParsedText:
        body = text.strip()
        tagged = body.startswith(_TAG)
        body = body.removeprefix(_TAG).strip()
        if not tagged and not body.startswith("{"):
            return ParsedText(content=text.strip())
        calls = Calls()
        if not body:
            calls.fail("a tool call has no JSON object")
        while body:
            try:
                _, end = json.JSONDecoder().raw_decode(body)
            except (ValueError, RecursionError):
                end = len(body)
            calls.add_json(body[:end], arguments_key="parameters")
            body = body[end:].lstrip().removeprefix(";").lstrip()
            if calls.found[-1].problem is not None:
                break
        failed = calls.found[-1].problem is not None
        return ParsedText(content=text.strip() if failed else "", calls=calls.found)
