"""verl's data set classes: items, subclasses, generators, collation."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.data.rlhf_dataset import (
    AbstractDataGenerator,
    DynamicGenDataset,
    RLHFDataset,
    collate_fn,
)
from slipstream.errors import ConfigError, DataError
from tests.data.helpers import char_tokenizer, ids


def write(path: Path, *prompts: str) -> Path:
    rows = [
        {"data_source": "x", "prompt": text, "reward_model": {"ground_truth": text}, "level": i}
        for i, text in enumerate(prompts)
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def test_items_have_verls_fields(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "ab", "far too long", "c")
    dataset = RLHFDataset(path, char_tokenizer(), {"max_prompt_length": 4})
    assert len(dataset) == 2
    item = dataset[0]
    assert item["input_ids"].tolist() == [129, 129, *ids("ab")]
    assert item["attention_mask"].tolist() == [0, 0, 1, 1]
    assert item["raw_prompt_ids"] == ids("ab")
    assert item["data_source"] == "x"
    assert item["reward_model"] == {"ground_truth": "ab"}
    assert item["level"] == 0
    assert "prompt" not in item
    assert item["raw_prompt"] == "ab"
    assert dataset[1]["level"] == 2
    with pytest.raises(IndexError):
        dataset[2]
    assert [item["level"] for item in dataset] == [0, 2]


def test_max_samples_is_a_seeded_choice_if_shuffled(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *"abcdefgh")
    first = RLHFDataset(path, char_tokenizer(), {"shuffle": False}, max_samples=3)
    assert [item["level"] for item in first] == [0, 1, 2]
    chosen = [
        [i["level"] for i in RLHFDataset(path, char_tokenizer(), {"seed": seed}, None, 3)]
        for seed in (1, 1, 2)
    ]
    assert chosen[0] == chosen[1] != chosen[2]


def test_a_subclass_may_have_its_own_rows() -> None:
    class Mine(RLHFDataset):
        def __init__(self, size: int, **kwargs: Any) -> None:
            self.dataframe = [f"state {i}" for i in range(size)]
            super().__init__(**kwargs)

        def __getitem__(self, index: int) -> dict[str, Any]:
            assert self.tokenizer is not None
            return {**self.tokenizer(self.dataframe[index], **self.tokenizer_kwargs)}

    dataset = Mine(3, tokenizer=char_tokenizer())
    assert len(dataset) == 3
    assert dataset[2]["input_ids"] == ids("state 2")


def test_missing_rows_and_missing_tokenizer(tmp_path: Path) -> None:
    assert len(RLHFDataset(tokenizer=char_tokenizer())) == 0
    with pytest.raises(DataError, match="RLHFDataset reads prompts but has no tokenizer"):
        RLHFDataset(write(tmp_path / "a.jsonl", "a"))
    with pytest.raises(DataError, match="no prompt is left: 1 longer than"):
        RLHFDataset(write(tmp_path / "b.jsonl", "abc"), char_tokenizer(), {"max_prompt_length": 2})


class Harder(AbstractDataGenerator):
    """Generates one overlong prompt, and one that is longer in each call."""

    calls = 0

    def state_dict(self) -> dict[str, int]:
        return {"calls": self.calls}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.calls = state["calls"]

    def generate(self, dataset: DynamicGenDataset) -> Iterable[Mapping[str, Any]]:
        seen = dataset.last_batch
        self.calls += 1
        return [{"prompt": "z" * 99}, {"prompt": "z" * len(dataset), "level": seen}]


def test_a_generator_adds_rows_after_each_batch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, config = write(tmp_path / "a.jsonl", "a", "b"), {"max_prompt_length": 9}
    dataset = DynamicGenDataset(path, char_tokenizer(), config, generator=Harder())
    assert [i["raw_prompt"] for i in dataset] == ["a", "b", "zz"]
    assert "1 prompts longer than data.max_prompt_length 9 tokens were left out" in caplog.text
    dataset.on_batch_end("seen")
    assert (dataset[3]["raw_prompt"], dataset[3]["level"]) == ("zzz", "seen")
    assert len({item["uid"] for item in dataset}) == 4

    again = DynamicGenDataset(path, char_tokenizer(), config, generator=Harder())
    again.load_state_dict(json.loads(json.dumps(dataset.state_dict())))
    assert [i["raw_prompt"] for i in again] == ["a", "b", "zz", "zzz"]
    assert [i["uid"] for i in again] == [i["uid"] for i in dataset]
    assert again.data_generator.calls == dataset.data_generator.calls == 2
    again.on_batch_end("more")
    dataset.on_batch_end("more")
    assert [i["uid"] for i in again] == [i["uid"] for i in dataset]


def test_the_configuration_names_the_generator(tmp_path: Path) -> None:
    code = tmp_path / "gen.py"
    code.write_text(
        "class Gen:\n"
        "    def __init__(self, config): self.config = config\n"
        "    def generate(self, dataset): return [{'prompt': self.config['extra']}]\n",
        encoding="utf-8",
    )
    path = write(tmp_path / "a.jsonl", "a")

    def dataset(**named: str) -> DynamicGenDataset:
        return DynamicGenDataset(path, char_tokenizer(), {"datagen": named, "extra": "new"})

    assert [i["raw_prompt"] for i in dataset(path=str(code), name="Gen")] == ["a", "new"]
    with pytest.raises(ConfigError, match=r"set data\.datagen\.path and data\.datagen\.name"):
        dataset(path=str(code))
    with pytest.raises(ConfigError, match=r"datagen.name 'Gem' is not in .* did you mean Gen"):
        dataset(path=str(code), name="Gem")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["text"], "row 0 that Bad generated must be a mapping, got str"),
        (None, "Bad.generate must return a list of rows (empty for none), got NoneType"),
        ("text", "Bad.generate must return a list of rows (empty for none), got str"),
        (
            [{"prompt": "a", "when": object()}],
            "row 0 that Bad generated does not consist of JSON types",
        ),
        ([{"text": "a"}], "row 0 that Bad generated has no column 'prompt'"),
    ],
)
def test_invalid_generated_rows_are_refused(tmp_path: Path, rows: Any, message: str) -> None:
    class Bad(AbstractDataGenerator):
        def generate(self, dataset: DynamicGenDataset) -> Any:
            return rows

    with pytest.raises(DataError, match=re.escape(message)):
        DynamicGenDataset(write(tmp_path / "a.jsonl", "a"), char_tokenizer(), generator=Bad())


def test_collate_fn_stacks_tensors_and_makes_object_arrays() -> None:
    batch = collate_fn(
        [{"ids": torch.tensor([1, 2]), "state": [1]}, {"ids": torch.tensor([3, 4]), "state": None}]
    )
    assert batch["ids"].tolist() == [[1, 2], [3, 4]]
    assert isinstance(batch["state"], np.ndarray)
    assert batch["state"].dtype == object
    assert batch["state"].tolist() == [[1], None]
    with pytest.raises(ValueError, match="1 of 2 items have a field 'b'"):
        collate_fn([{"a": 1, "b": 1}, {"a": 1}])


def test_items_match_rows_changed_by_a_subclass(tmp_path: Path) -> None:
    class Odd(RLHFDataset):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.dataframe = [row for row in self.dataframe if row["level"] % 2]
            self.dataframe.append({"prompt": "own", "level": 9})
            self.dataframe[0]["prompt"] = "changed"

    items = list(Odd(write(tmp_path / "a.jsonl", *"abcd"), char_tokenizer()))
    assert [(item["raw_prompt"], item["level"]) for item in items] == [
        ("changed", 1),
        ("d", 3),
        ("own", 9),
    ]
    assert [item["reward_model"]["ground_truth"] for item in items[:2]] == ["b", "d"]
    assert [item["raw_prompt_ids"] for item in items] == [ids("changed"), ids("d"), ids("own")]
    assert [item["uid"] for item in items] == ["a.jsonl:1", "a.jsonl:3", "Odd:2"]


def test_overridden_methods_of_verl_are_called(tmp_path: Path) -> None:
    class Hooked(RLHFDataset):
        def _read_files_and_tokenize(self) -> None:
            super()._read_files_and_tokenize()
            self.dataframe.reverse()

        def maybe_filter_out_long_prompts(self, dataframe: Any) -> list[Any]:
            return super().maybe_filter_out_long_prompts(dataframe[1:])

        def _build_messages(self, example: dict[str, Any]) -> str:  # type: ignore[override]
            return f"<{example.pop(self.prompt_key)}{example.pop('level')}>"

    items = list(Hooked(write(tmp_path / "a.jsonl", *"abc"), char_tokenizer()))
    assert [item["raw_prompt"] for item in items] == ["<c2>", "<b1>"]
    assert "level" not in items[0]


def test_the_length_may_come_from_an_environment() -> None:
    class Walk(RLHFDataset):
        def __init__(self, env: list[str], **kwargs: Any) -> None:
            self.env = env
            super().__init__(**kwargs)

    assert len(Walk(["a", "b"])) == 2
    assert len(RLHFDataset()) == 0


def test_identity_depends_on_the_rows(tmp_path: Path) -> None:
    def identity(*prompts: str) -> str:
        return RLHFDataset(write(tmp_path / "a.jsonl", *prompts), char_tokenizer()).identity()

    assert identity("a", "b") == identity("a", "b")
    assert len({identity("a", "b"), identity("a", "c"), identity("a")}) == 3
    assert RLHFDataset().identity() == ""


def test_verls_attributes_follow_the_configuration(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "ab")
    plain = RLHFDataset(str(path), char_tokenizer())
    assert (plain.data_files, plain.original_data_files) == ([str(path)], [str(path)])
    assert plain.original_data_files is not plain.data_files
    assert (plain.truncation, plain.filter_overlong_prompts) == ("error", True)
    assert (plain.image_key, plain.video_key) == ("images", "videos")
    assert (plain.apply_chat_template_kwargs, plain.return_raw_chat) == ({}, False)
    assert isinstance(plain.num_workers, int)
    assert plain.num_workers >= 1
    config = {
        "truncation": "left",
        "filter_overlong_prompts": False,
        "image_key": "pictures",
        "apply_chat_template_kwargs": {"enable_thinking": False},
        "filter_overlong_prompts_workers": 1,
        "return_raw_chat": True,
    }
    own = RLHFDataset([path], char_tokenizer(), config)
    assert (own.truncation, own.filter_overlong_prompts) == ("left", False)
    assert (own.image_key, own.num_workers, own.return_raw_chat) == ("pictures", 1, True)
    assert own.apply_chat_template_kwargs == {"enable_thinking": False}


def test_attributes_that_a_subclass_assigns_count(tmp_path: Path) -> None:
    class Cut(RLHFDataset):
        def _read_files_and_tokenize(self) -> None:
            self.truncation, self.filter_overlong_prompts = "right", False
            super()._read_files_and_tokenize()

    path = write(tmp_path / "a.jsonl", "abcdef")
    dataset = Cut(path, char_tokenizer(), {"max_prompt_length": 4})
    assert dataset[0]["raw_prompt_ids"] == ids("abcd")
    dataset.truncation = "left"
    assert dataset[0]["raw_prompt_ids"] == ids("cdef")


def test_the_hook_for_messages_may_take_the_columns_name(tmp_path: Path) -> None:
    class Loud(RLHFDataset):
        def _build_messages(self, example: dict[str, Any], key: str | None = None) -> Any:
            assert key == "prompt"
            return super()._build_messages(example, key).upper()

    path = write(tmp_path / "a.jsonl", "ab")
    assert Loud(path, char_tokenizer())[0]["raw_prompt"] == "AB"


def test_an_image_in_the_column_of_images_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": "ab", "pictures": ["a.png"]}), encoding="utf-8")
    assert RLHFDataset(path, char_tokenizer())[0]["pictures"] == ["a.png"]
    with pytest.raises(DataError, match="has images, and models here read text only"):
        RLHFDataset(path, char_tokenizer(), {"image_key": "pictures"})


def test_split_and_resume_dataset_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "a.jsonl", *"abcde")
    dataset = RLHFDataset(path, char_tokenizer(), {"shuffle": False})
    parts = dataset.split(2)
    assert [[item["level"] for item in part] for part in parts] == [[0, 1], [2, 3]]
    assert "1 of 5 rows are left out" in caplog.text
    assert parts[0].original_data_files == dataset.original_data_files
    for number in (0, 6):
        with pytest.raises(ValueError, match=f"num_splits={number} must be from 1 to the 5 rows"):
            dataset.split(number)
    dataset.dataframe = []
    dataset.resume_dataset_state()
    assert len(dataset) == 5
