"""Items are converted to prompts and prompts to items."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.data.datasets import PromptReader
from slipstream.data.items import as_item, as_prompt
from slipstream.errors import DataError
from slipstream.types import Prompt
from tests.data.helpers import char_tokenizer, ids


def read(item: Any, **options: Any) -> Prompt:
    reader = PromptReader(
        tokenizer=char_tokenizer(), **{"max_prompt_length": 20, "filter_overlong": False, **options}
    )
    prompt = as_prompt(item, reader=reader, name="Mine", index=3)
    reader.truncate(prompt, "Mine[3]")
    return prompt


def test_padding_is_removed_and_other_fields_reach_the_reward() -> None:
    prompt = read(
        {
            "input_ids": torch.tensor([0, 0, 65, 66]),
            "attention_mask": torch.tensor([0, 0, 1, 1]),
            "position_ids": torch.tensor([0, 0, 0, 1]),
            "prompt": "AB",
            "state": (1, 2),
            "expected_action": "left",
            "data_source": "grid",
            "reward_model": {"ground_truth": "7"},
            "extra_info": {"split": "train"},
        }
    )
    assert prompt.ids == [65, 66]
    assert (prompt.uid, prompt.messages, prompt.data_source) == ("Mine:3", "AB", "grid")
    assert prompt.ground_truth == "7"
    assert prompt.extra_info == {
        "prompt": "AB",
        "state": (1, 2),
        "expected_action": "left",
        "split": "train",
    }


def test_messages_are_rendered_if_there_are_no_ids() -> None:
    messages = [{"role": "user", "content": "1+1?"}]
    expected = ids("<s>user:1+1?<e>\n<s>assistant:")
    for value in (messages, tuple(messages), np.array(messages, dtype=object)):
        prompt = read({"raw_prompt": value, "uid": 12}, max_prompt_length=99)
        assert prompt.ids == expected
        assert prompt.messages == messages
        assert prompt.uid == "12"
    assert read({"prompt": "abc"}).ids == ids("abc")


@pytest.mark.parametrize("value", [[[65, 66]], torch.tensor([[65, 66]]), np.array([65, 66])])
def test_ids_may_be_any_array_or_a_batch_of_one(value: Any) -> None:
    assert read({"input_ids": value}).ids == [65, 66]


def test_as_item_and_as_prompt_round_trip() -> None:
    row = {"data_source": "x", "extra_info": {"index": 4, "tools_kwargs": {"t": 1}}, "level": 2}
    prompt_in = Prompt(uid="f:4", ids=[5, 6, 7], messages="p")
    item = as_item(prompt_in, row, length=5, pad=9)
    assert item["input_ids"].tolist() == [9, 9, 5, 6, 7]
    assert item["attention_mask"].tolist() == [0, 0, 1, 1, 1]
    assert item["position_ids"].tolist() == [0, 0, 0, 1, 2]
    assert item["raw_prompt_ids"] == [5, 6, 7]
    assert (item["index"], item["tools_kwargs"], item["interaction_kwargs"]) == (4, {"t": 1}, {})
    prompt = read(item)
    assert (prompt.uid, prompt.ids, prompt.data_source) == ("f:4", [5, 6, 7], "x")
    assert prompt.extra_info == {"index": 4, "tools_kwargs": {"t": 1}, "level": 2}


def test_overlong_items_are_truncated_as_configured() -> None:
    item = {"input_ids": list(range(30))}
    assert read(item, truncation="left").ids == list(range(10, 30))
    with pytest.raises(DataError, match=r"Mine\[3\]: 30 tokens are more than"):
        read(item)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("text", "Mine[3] must be a mapping of fields, got str"),
        ({"state": 1}, "Mine[3] has no prompt: it needs input_ids"),
        ({"input_ids": "AB"}, "Mine[3]: 'input_ids' must be a list of token ids, got AB"),
        ({"input_ids": [1.5]}, "must be a list of token ids"),
        (
            {"input_ids": [1, 2], "attention_mask": [1]},
            "2 input_ids, but an attention_mask of length 1",
        ),
        ({"input_ids": [1], "attention_mask": [0]}, "the prompt has no tokens"),
        ({"input_ids": [1], "reward_model": "7"}, "'reward_model' must be an object, got str: '7'"),
        ({"prompt": [{"content": "x"}]}, "message 0 needs 'role' and 'content'"),
    ],
)
def test_invalid_items_are_refused(item: Any, message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        read(item)


def test_changed_messages_are_rendered_again() -> None:
    prompt_in = Prompt(uid="u", ids=ids("ab"), messages="ab")
    item = as_item(prompt_in, {}, length=5, pad=9)
    assert read(item).ids == ids("ab")
    assert read({**item, "raw_prompt": "cd"}).ids == ids("cd")
    talk = [{"role": "user", "content": "ab"}]
    item = as_item(Prompt(uid="u", ids=[1], messages=talk), {}, length=5, pad=9)
    talk[0]["content"] = "cd"
    assert read(item, max_prompt_length=99).ids == ids("<s>user:cd<e>\n<s>assistant:")


def test_the_column_ground_truth_is_used() -> None:
    assert read({"prompt": "a", "ground_truth": "7"}).ground_truth == "7"
    both = {"prompt": "a", "ground_truth": "7", "reward_model": {"ground_truth": "8"}}
    assert read(both).ground_truth == "8"
    assert read(both).extra_info["ground_truth"] == "7"


@pytest.mark.parametrize("content", [5, {"a": 1}, [], None])
def test_contents_other_than_text_are_refused(content: Any) -> None:
    message = "column 'prompt', message 0: 'content' must be text, got "
    with pytest.raises(DataError, match=re.escape(f"Mine[3]: {message}{type(content).__name__}")):
        read({"prompt": [{"role": "user", "content": content}]})


@pytest.mark.parametrize("column", ["prompt", "raw_prompt"])
def test_a_prompt_of_null_is_named(column: str) -> None:
    with pytest.raises(DataError, match=re.escape(f"Mine[3]: column '{column}' is null")):
        read({column: None})
