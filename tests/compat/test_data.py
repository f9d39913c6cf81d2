"""verl's factory functions for data sets and samplers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.compat.verl import (
    DynamicGenDataset,
    RLHFDataset,
    create_rl_dataset,
    create_rl_sampler,
)
from slipstream.data.samplers import PassRateSampler
from tests.data.helpers import char_tokenizer


def test_create_rl_dataset_follows_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text}) for text in "abcd"))
    code = tmp_path / "mine.py"
    code.write_text(
        "from slipstream.compat.verl import RLHFDataset\n"
        "class Mine(RLHFDataset): pass\n"
        "class Gen:\n"
        "    def __init__(self, config): pass\n"
        "    def generate(self, dataset): return [{'prompt': 'new'}]\n"
    )
    plain = create_rl_dataset(path, {"max_prompt_length": 9}, char_tokenizer())
    assert type(plain) is RLHFDataset
    assert [item["raw_prompt"] for item in plain] == list("abcd")
    own = {"custom_cls": {"path": str(code), "name": "Mine"}}
    assert type(create_rl_dataset([path], own, char_tokenizer())).__name__ == "Mine"
    grown = {"datagen": {"path": str(code), "name": "Gen"}}
    dynamic = create_rl_dataset(str(path), grown, char_tokenizer())
    assert type(dynamic) is DynamicGenDataset
    assert len(dynamic) == 5
    assert len(create_rl_dataset(path, grown, char_tokenizer(), is_train=False)) == 4
    assert len(create_rl_dataset(path, {}, char_tokenizer(), max_samples=2)) == 2
    with pytest.raises(ValueError, match="models here read text"):
        create_rl_dataset(path, {}, char_tokenizer(), processor=object())


def test_create_rl_sampler_follows_the_configuration() -> None:
    rows = list(range(20))
    assert list(create_rl_sampler({"shuffle": False}, rows)) == rows
    one, two = (list(create_rl_sampler({"seed": 3}, rows)) for _ in range(2))
    assert one == two != rows
    assert sorted(one) == rows
    curriculum = create_rl_sampler({"sampler": {"class_name": "PassRateSampler"}}, rows)
    assert isinstance(curriculum, PassRateSampler)
