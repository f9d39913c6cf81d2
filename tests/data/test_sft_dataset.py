"""verl's `MultiTurnSFTDataset`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.data.sft_dataset import MultiTurnSFTDataset
from slipstream.errors import ConfigError, DataError
from tests.data.helpers import CHATML, char_tokenizer, ids

TALK = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "bc"},
    {"role": "user", "content": "d"},
    {"role": "assistant", "content": "e", "loss_mask": 0},
]
FIRST = "<s>user:a<e>\n<s>assistant:"
WRITTEN = "bc<e>"
REST = "\n<s>user:d<e>\n<s>assistant:e<e>\n"


def write(path: Path, **columns: Any) -> Path:
    path.write_text(json.dumps({"messages": TALK, **columns}) + "\n", encoding="utf-8")
    return path


def test_items_have_loss_on_assistant_turns(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl")
    (item,) = MultiTurnSFTDataset(path, char_tokenizer(), {"max_length": 99})
    expected = ids(FIRST + WRITTEN + REST)
    count = len(expected)
    assert item["input_ids"].tolist() == expected + [129] * (99 - count)
    assert item["attention_mask"].tolist() == [1] * count + [0] * (99 - count)
    assert item["position_ids"].tolist() == list(range(count)) + [0] * (99 - count)
    before, written = len(ids(FIRST)), len(ids(WRITTEN))
    assert item["loss_mask"].tolist() == [0] * before + [1] * written + [0] * (
        99 - before - written
    )


def test_no_padding_and_truncation(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl")
    config = {"max_length": 40, "truncation": "right", "pad_mode": "no_padding"}
    (item,) = MultiTurnSFTDataset(path, char_tokenizer(), config)
    assert item["input_ids"].tolist() == ids(FIRST + WRITTEN + REST)[:40]
    with pytest.raises(DataError, match="is longer than max_length 40"):
        MultiTurnSFTDataset(path, char_tokenizer(), {"max_length": 40})
    with pytest.raises(ConfigError, match="pad_mode 'left' is unknown; use right, no_padding"):
        MultiTurnSFTDataset(path, char_tokenizer(), {"pad_mode": "left"})


def test_enable_thinking_is_read_from_the_row(tmp_path: Path) -> None:
    template = CHATML.replace("{% for", "{{ 'T' if enable_thinking else 'N' }}{% for", 1)

    def first(**columns: Any) -> str:
        path = write(tmp_path / "a.jsonl", **columns)
        config = {"multiturn": {"enable_thinking_key": "think"}, "pad_mode": "no_padding"}
        (item,) = MultiTurnSFTDataset(path, char_tokenizer(template), config)
        return chr(int(item["input_ids"][0]))

    assert (first(think=True), first(think=False), first()) == ("T", "N", "N")
    with pytest.raises(DataError, match="column 'think' must be true or false, got 'yes'"):
        first(think="yes")


def test_a_processor_is_refused_also_by_position(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl")
    for processor in (object(), 5):
        with pytest.raises(ConfigError, match=r"processor=.*pass max_samples=\.\.\. by name"):
            MultiTurnSFTDataset(path, char_tokenizer(), {}, processor)
    assert len(MultiTurnSFTDataset(path, char_tokenizer(), {}, None, max_samples=1)) == 1
