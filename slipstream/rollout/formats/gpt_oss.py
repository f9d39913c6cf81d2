"""OpenAI's harmony format of gpt-oss: channels `analysis`, `commentary` and `final`, and calls to
`functions.NAME`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from slipstream.environment.protocol import ToolSchema
from slipstream.rollout.formats.protocol import Calls, ParsedText, loads

_BODY, _ENDS = "<|message|>", re.compile(r"<\|(?:end|call|return)\|>")
_TO = re.compile(r"to=functions\.([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class GptOssFormat:
    """`CallFormat` of harmony messages."""

    name = "gpt-oss"
    stop_tokens: tuple[str, ...] = ("<|call|>", "<|return|>")

    def written_by(self, template: str) -> bool:
        return all(part in template for part in ("<|channel|>", "<|call|>", "functions."))

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> ParsedText:
        calls, reasoning, content = Calls(), list[str](), list[str]()
        for header, body in _messages(text):
            if (to := _TO.search(header)) is not None:
                _add(calls, to[1], body)
                if calls.found[-1].problem is not None:
                    content.append(body)
                continue
            channel = _CHANNEL.search(header)
            is_analysis = channel is not None and channel[1] == "analysis"
            (reasoning if is_analysis else content).append(body.strip())
        if not content and not reasoning and not calls.found:
            content = [text.strip()]
        return ParsedText(
            content="\n".join(content),
            reasoning="\n".join(reasoning) if reasoning else None,
            calls=calls.found,
        )


def _messages(text: str) -> Iterator[tuple[str, str]]:
    """Yield header and body of each message. Text without a body is no message."""
    done = 0
    while (place := text.find(_BODY, done)) >= 0:
        start = place + len(_BODY)
        end = _ENDS.search(text, start)
        yield text[done:place], text[start : len(text) if end is None else end.start()]
        done = len(text) if end is None else end.end()


def _add(calls: Calls, name: str, body: str) -> None:
    try:
        calls.add(name, loads(body))
    except ValueError as error:
        calls.fail(f"the arguments are not valid JSON: {error}", name=name)
