"""Contents of messages in the forms of public data sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from slipstream.data.datasets import load_prompts
from slipstream.data.messages import with_text
from slipstream.data.sft import load_sft_samples, tokenize_conversation
from slipstream.errors import DataError
from tests.data.helpers import STYLES, byte_tokenizer, char_tokenizer, ids

HI = {"type": "text", "text": "hi"}
CALL = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


@pytest.mark.parametrize(
    "content",
    [
        "hi",
        [HI],
        ["hi"],
        [{"text": "hi"}],
        [{"type": "input_text", "text": "hi", "image": None}],
        [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}],
        (HI,),
        np.array([HI], dtype=object),
    ],
)
def test_text_parts_are_joined(content: Any) -> None:
    assert with_text(user(content), "x") == user("hi")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([HI, {"type": "image_url", "image_url": {"url": "a"}}], "part 1 is 'image_url'"),
        ([{"type": "image"}], "part 0 is 'image'"),
        ([{"image": "a.png", "type": None}], "part 0 is 'image'"),
        ([{"type": "input_audio", "input_audio": {}}], "part 0 is 'input_audio'"),
        ([{"type": "video", "video": "a", "text": "hi"}], "part 0 is 'video'"),
        ([{"type": "text", "text": 5}], "part 0: 'text' must be text, got 5"),
        ([{"type": "text"}], "part 0: 'text' must be text, got None"),
        ([5], "part 0: a part of a content"),
        ([], "'content' must be text, got list"),
        (5, "'content' must be text, got int 5"),
        (1.5, "'content' must be text, got float 1.5"),
        (True, "'content' must be text, got bool True"),
        (HI, "'content' must be text, got dict"),
        (None, "'content' must be text, got NoneType"),
    ],
)
def test_other_contents_are_refused_by_row(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"prompt": [user("hi")]}, {"prompt": [user("hi"), user(content)]}]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    with pytest.raises(DataError, match=r"a\.jsonl, row 1: column 'prompt', message 1") as caught:
        load_prompts(path, char_tokenizer(), max_prompt_length=99)
    assert message in str(caught.value)
    rows = [{"messages": [user(content), {"role": "assistant", "content": "a"}]}]
    path.write_text(json.dumps(rows[0]))
    with pytest.raises(DataError, match=r"a\.jsonl, row 0: column 'messages', message 0") as caught:
        load_sft_samples(path, char_tokenizer())
    assert message in str(caught.value)


@pytest.mark.parametrize("calls", [5, "[]", {"name": "add"}, ["add"]])
def test_tool_calls_are_a_list_of_objects(calls: Any) -> None:
    with pytest.raises(DataError, match=r"x: 'tool_calls' must be a list of objects"):
        with_text({"role": "assistant", "content": "a", "tool_calls": calls}, "x")


@pytest.mark.parametrize("field", ["tool_calls", "reasoning_content"])
def test_a_content_may_be_missing_beside_tool_calls_or_reasoning(field: str) -> None:
    message = {"role": "assistant", field: CALL}
    assert with_text(message, "x") == {**message, "content": ""}
    assert with_text({**message, "content": None}, "x") == {**message, "content": ""}


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_prompts_and_conversations_of_parts_equal_those_of_text(
    tmp_path: Path, suffix: str
) -> None:
    def write(name: str, rows: list[dict[str, Any]]) -> Path:
        path = tmp_path / f"{name}{suffix}"
        if suffix == ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        else:
            path.write_text("\n".join(json.dumps(row) for row in rows))
        return path

    tokenizer = char_tokenizer()
    text = [user("say a"), {"role": "assistant", "content": "a"}]
    parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in text]
    (prompt,) = load_prompts(write("p", [{"prompt": parts[:1]}]), tokenizer, max_prompt_length=99)
    assert prompt.ids == ids("<s>user:say a<e>\n<s>assistant:")
    assert prompt.messages == text[:1]
    (sample,) = load_sft_samples(write("s", [{"messages": parts}]), tokenizer)
    assert sample.tokens == ids("<s>user:say a<e>\n<s>assistant:a<e>\n")
    assert sample.tokens == tokenize_conversation(parts, tokenizer).ids
    assert sample.response == "a"


def test_a_tool_call_without_content_is_learnt() -> None:
    template = (
        "{% for m in messages %}<s>{{ m.role }}:{{ m['content'] + '' }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}"
        "({{ c.function.arguments | tojson }})"
        "{% endfor %}<e>\n{% endfor %}{% if add_generation_prompt %}<s>assistant:{% endif %}"
    )
    turns = [user("1+1?"), {"role": "assistant", "content": None, "tool_calls": CALL}]
    found = tokenize_conversation(turns, char_tokenizer(template))
    learnt = [i for i, mask in zip(found.ids, found.loss_mask, strict=True) if mask]
    assert learnt == ids('add({"a": 1})<e>')
    with pytest.raises(DataError, match=r"tool call of message 1.*custom_chat_template"):
        tokenize_conversation(turns, char_tokenizer())


def test_a_response_continues_a_last_message_of_the_assistant(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.jsonl"
    start = {"role": "assistant", "content": "Let me"}
    rows = [{"prompt": [user("1+1?"), start]}, {"prompt": [user("1+1?")]}]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    continued, plain = load_prompts(path, char_tokenizer(), max_prompt_length=99)
    assert continued.ids == ids("<s>user:1+1?<e>\n<s>assistant:Let me")
    assert plain.ids == ids("<s>user:1+1?<e>\n<s>assistant:")
    assert "1 of 2 prompts" in caplog.text
    tokenizer = byte_tokenizer(["<|im_start|>", "<|im_end|>"], STYLES["chatml"])
    (first, _) = load_prompts(path, tokenizer, max_prompt_length=99)
    expected = tokenizer.apply_chat_template(
        rows[0]["prompt"], continue_final_message=True, return_dict=False
    )
    assert first.ids == expected
    called = {"role": "assistant", "content": "", "tool_calls": CALL}
    path.write_text(json.dumps({"prompt": [user("1+1?"), called]}))
    with pytest.raises(DataError, match=r"row 0"):
        load_prompts(path, char_tokenizer(), max_prompt_length=99)
