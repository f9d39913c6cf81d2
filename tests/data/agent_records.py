"""Records of finished trajectories for tests, with and without tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look up a person.",
            "parameters": {"type": "object", "properties": {"name": {"type": "string"}}},
        },
    }
]


def call(key: str = "call00001", arguments: Any = '{"name": " ana"}') -> dict[str, Any]:
    function = {"name": "look_up", "arguments": arguments}
    return {"id": key, "type": "function", "function": function}


def conversation() -> list[dict[str, Any]]:
    """A question, a call without text, the answer of the tool, and the answer."""
    return [
        {"role": "user", "content": "who is ana 's boss ?"},
        {"role": "assistant", "content": None, "tool_calls": [call()], "refusal": None},
        {"role": "tool", "tool_call_id": "call00001", "content": "ana : boss dan"},
        {"role": "assistant", "content": "answer dan"},
    ]


def record(**more: Any) -> dict[str, Any]:
    return {"messages": conversation(), "tools": TOOLS, "reward": 1.0, **more}


def with_tokens(**more: Any) -> dict[str, Any]:
    """The conversation with tokens; the second prompt begins with all tokens before it."""
    made = record(group="ana", **more)
    messages = made["messages"]
    messages[1] |= {"prompt_token_ids": [1, 2], "token_ids": [3, 4], "logprobs": [-0.5, -0.25]}
    messages[3] |= {
        "prompt_token_ids": [1, 2, 3, 4, 5, 6],
        "token_ids": [7],
        "logprobs": {"content": [{"token": "dan", "logprob": -0.125}]},
        "version": 3,
    }
    return made


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(f"{json.dumps(one)}\n" for one in records), encoding="utf-8")
    return path
