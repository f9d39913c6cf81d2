"""Prompts are read from data set files."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from slipstream.data.datasets import PromptReader, inspect_prompts, load_prompts, truncate_ids
from slipstream.data.rlhf_dataset import RLHFDataset
from slipstream.errors import ConfigError, DataError
from tests.data.helpers import char_tokenizer, ids


def row(index: int, content: str = "1+1?") -> dict[str, Any]:
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": content}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(index)},
        "extra_info": {"split": "train", "index": index},
    }


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("\n".join(json.dumps(r) for r in rows) + "\n\n")
    return path


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json"])
def test_rows_are_read_from_every_format(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"data{suffix}", [row(7), row(8, "2+2?")])
    prompts = load_prompts(path, char_tokenizer(), max_prompt_length=100)
    assert [p.uid for p in prompts] == [f"data{suffix}:0", f"data{suffix}:1"]
    second = prompts[1]
    assert second.ids == ids("<s>user:2+2?<e>\n<s>assistant:")
    assert second.messages == [{"role": "user", "content": "2+2?"}]
    assert second.data_source == "openai/gsm8k"
    assert second.ground_truth == "8"
    assert second.extra_info == {"split": "train", "index": 8}
    assert second.ability == "math"


@pytest.mark.parametrize(
    "asked",
    [
        {"agent_name": "tool_agent"},
        {"need_tools_kwargs": True},
        {"tools_kwargs": {"search": {"create_kwargs": {"k": 1}}}},
        {"interaction_kwargs": {"name": "gsm8k"}},
    ],
)
def test_rows_that_ask_for_tools_are_announced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, asked: dict[str, Any]
) -> None:
    with_tools = row(1)
    if "agent_name" in asked:
        with_tools |= asked
    else:
        with_tools["extra_info"] |= asked
    path = write(tmp_path / "a.jsonl", [row(0), with_tools, row(2)])
    with caplog.at_level(logging.WARNING):
        assert len(load_prompts(path, char_tokenizer(), max_prompt_length=100)) == 3
    assert "1 of 3 rows ask for tools" in caplog.text


def test_rows_of_a_single_turn_are_not_announced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = row(0) | {"agent_name": "single_turn_agent"}
    plain["extra_info"] |= {"need_tools_kwargs": False, "tools_kwargs": {}}
    path = write(tmp_path / "a.jsonl", [plain, row(1) | {"agent_name": None}])
    with caplog.at_level(logging.WARNING):
        load_prompts(path, char_tokenizer(), max_prompt_length=100)
    assert caplog.text == ""


def test_plain_text_is_tokenized_without_a_template(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"question": "Say hi", "source": "mine", "level": 3}])
    (prompt,) = load_prompts(
        path,
        char_tokenizer(None),
        prompt_key="question",
        reward_fn_key="source",
        max_prompt_length=10,
    )
    assert (prompt.ids, prompt.messages) == (ids("Say hi"), "Say hi")
    assert prompt.data_source == "mine"
    assert prompt.extra_info == {"level": 3}


def test_files_are_concatenated_with_unique_uids(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "t.jsonl", [row(0), row(1)])
    prompts = load_prompts(
        [tmp_path / "x" / "t.jsonl", str(tmp_path / "y" / "t.jsonl")],
        char_tokenizer(),
        max_prompt_length=100,
    )
    assert [p.uid for p in prompts] == ["0-t.jsonl:0", "0-t.jsonl:1", "1-t.jsonl:0", "1-t.jsonl:1"]


def test_max_samples_uses_the_first_rows_or_a_seeded_choice(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [row(i) for i in range(50)])

    def indices(seed: int | None) -> list[int]:
        got = load_prompts(path, char_tokenizer(), max_prompt_length=100, max_samples=5, seed=seed)
        return [p.extra_info["index"] for p in got]

    assert indices(None) == [0, 1, 2, 3, 4]
    assert indices(1) == indices(1) == sorted(indices(1))
    assert len(set(indices(1))) == 5
    assert indices(1) != indices(2)
    with pytest.raises(ConfigError, match="max_samples 0"):
        load_prompts(path, char_tokenizer(), max_prompt_length=100, max_samples=0)


def test_truncation_modes() -> None:
    text = list(range(10))
    assert truncate_ids(text, 4, "left") == [6, 7, 8, 9]
    assert truncate_ids(text, 4, "right") == [0, 1, 2, 3]
    assert truncate_ids(text, 5, "middle") == [0, 1, 7, 8, 9]
    assert truncate_ids(text, 1, "middle") == [9]
    assert truncate_ids(text, 10, "error") == text
    with pytest.raises(DataError, match=r"10 tokens are more than data\.max_prompt_length 9"):
        truncate_ids(text, 9, "error")


def test_overlong_prompts_are_filtered_or_truncated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "a.jsonl", [row(0, "x" * 30), row(1)])
    tokenizer = char_tokenizer()
    with caplog.at_level(logging.WARNING):
        (kept,) = load_prompts(path, tokenizer, max_prompt_length=40, filter_overlong=True)
    assert kept.extra_info["index"] == 1
    assert "1 prompts longer than data.max_prompt_length 40 tokens were left out" in caplog.text
    cut = load_prompts(
        path, tokenizer, max_prompt_length=40, filter_overlong=False, truncation="left"
    )
    assert len(cut[0].ids) == 40
    assert cut[0].ids[-11:] == ids("<s>assistant:")
    with pytest.raises(DataError, match=r"a\.jsonl, row 0: 49 tokens are more than"):
        load_prompts(path, tokenizer, max_prompt_length=40, filter_overlong=False)
    with pytest.raises(DataError, match="no prompt is left: 2 longer"):
        load_prompts(path, tokenizer, max_prompt_length=3)


def test_rows_whose_template_fails_are_counted_and_listed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strict = "{% if messages[0]['content'] == 'bad' %}{{ raise_exception('no bad') }}{% endif %}"
    strict += "{{ messages[0]['content'] }}"
    path = write(tmp_path / "a.jsonl", [row(i, "bad" if i % 2 else "good") for i in range(14)])
    with caplog.at_level(logging.WARNING):
        prompts = load_prompts(path, char_tokenizer(strict), max_prompt_length=9)
    assert [p.extra_info["index"] for p in prompts] == list(range(0, 14, 2))
    assert "failed on 7 rows" in caplog.text
    assert "a.jsonl, row 1 (TemplateError: no bad)" in caplog.text
    assert "and 2 more" in caplog.text
    loaded = inspect_prompts(
        path, PromptReader(tokenizer=char_tokenizer(strict), max_prompt_length=9)
    )
    assert len(loaded.failed) == 7
    all_bad = write(tmp_path / "b.jsonl", [row(0, "bad")])
    with pytest.raises(DataError, match=r"no prompt is left.*failed on 1 rows"):
        load_prompts(all_bad, char_tokenizer(strict), max_prompt_length=9)


def test_template_options_and_tools_reach_the_template(tmp_path: Path) -> None:
    template = "{{ tools | length if tools else 0 }}{{ mode }}{{ messages[0]['content'] }}"
    path = write(tmp_path / "a.jsonl", [row(0)])
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    (prompt,) = load_prompts(
        path,
        char_tokenizer(template),
        max_prompt_length=9,
        tools=[tool],
        template_kwargs={"mode": "z"},
    )
    assert prompt.ids == ids("1z1+1?")
    with pytest.raises(ConfigError, match=r"data\.apply_chat_template_kwargs.*tokenize"):
        PromptReader(
            tokenizer=char_tokenizer(), max_prompt_length=9, template_kwargs={"tokenize": False}
        )


@pytest.mark.parametrize("column", ["images", "videos"])
def test_pictures_are_refused(column: str, tmp_path: Path) -> None:
    """No model here reads them."""
    path = write(tmp_path / "a.jsonl", [row(0), {**row(1), column: ["cat.png"]}])
    with pytest.raises(DataError, match=f"a.jsonl.* has {column}, .*without these columns"):
        load_prompts(path, char_tokenizer(), max_prompt_length=60)
    # An empty column is none.
    path = write(tmp_path / "b.jsonl", [{**row(0), column: []}])
    (prompt,) = load_prompts(path, char_tokenizer(), max_prompt_length=60)
    assert prompt.extra_info.get(column) is None
    with pytest.raises(DataError, match="omit the processor"):
        RLHFDataset(path, char_tokenizer(), processor=object())


def test_missing_prompt_column_names_file_columns_and_setting(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [{"question": "hi", "answer": "ho"}])
    with pytest.raises(
        DataError,
        match=r"a\.parquet, row 0 has no column 'prompt'; columns found: question, answer\. "
        r"Set data\.prompt_key",
    ):
        load_prompts(path, char_tokenizer(), max_prompt_length=9)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"prompt": []}, "non-empty list of messages"),
        ({"prompt": 3}, "non-empty list of messages.*got 3"),
        ({"prompt": [{"role": "user"}]}, "message 0 needs 'role' and 'content'"),
        ({"prompt": [{"role": "user", "content": "x"}], "extra_info": 3}, "'extra_info' must be"),
        ({"prompt": ""}, "the prompt has no tokens"),
        ({"prompt": None}, "row 0: column 'prompt' is null"),
        (["prompt"], "line 1: a row must be a JSON object"),
    ],
)
def test_invalid_rows_are_refused(tmp_path: Path, value: Any, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(value))
    with pytest.raises(DataError, match=message):
        load_prompts(path, char_tokenizer(), max_prompt_length=99)


def test_messages_need_a_chat_template(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [row(0)])
    with pytest.raises(DataError, match=r"actor_rollout_ref\.model\.custom_chat_template"):
        load_prompts(path, char_tokenizer(None), max_prompt_length=99)


def test_folders_written_by_datasets_are_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    saved = datasets.Dataset.from_list([row(i, f"{i}?") for i in range(5)])
    saved.save_to_disk(tmp_path / "one", num_shards=2)
    prompts = load_prompts(tmp_path / "one", char_tokenizer(), max_prompt_length=100)
    jsonl = write(tmp_path / "a.jsonl", [row(i, f"{i}?") for i in range(5)])
    expected = load_prompts(jsonl, char_tokenizer(), max_prompt_length=100)
    assert [(p.ids, p.messages, p.ground_truth, p.extra_info) for p in prompts] == [
        (p.ids, p.messages, p.ground_truth, p.extra_info) for p in expected
    ]
    assert [p.uid for p in prompts] == [f"one:{i}" for i in range(5)]

    datasets.DatasetDict(train=saved, test=saved).save_to_disk(tmp_path / "two")
    with pytest.raises(
        DataError, match=r"has several splits; give one of: .*two/test, .*two/train"
    ):
        load_prompts(tmp_path / "two", char_tokenizer(), max_prompt_length=100)
    assert len(load_prompts(tmp_path / "two/test", char_tokenizer(), max_prompt_length=100)) == 5
    with pytest.raises(DataError, match=r"give its \.parquet, \.jsonl or \.json files one by one"):
        load_prompts(tmp_path, char_tokenizer(), max_prompt_length=100)
    (tmp_path / "one" / "data-00001-of-00002.arrow").write_bytes(b"broken")
    with pytest.raises(DataError, match="is not a readable Arrow file"):
        load_prompts(tmp_path / "one", char_tokenizer(), max_prompt_length=100)


def test_invalid_files_are_refused(tmp_path: Path) -> None:
    def load(path: Path | list[Path]) -> None:
        load_prompts(path, char_tokenizer(), max_prompt_length=9)

    with pytest.raises(DataError, match=r"does not exist: check data\.train_files"):
        load(tmp_path / "no.parquet")
    with pytest.raises(DataError, match=r"no data files: set data\.train_files"):
        load([])
    for name, content, message in (
        ("a.csv", b"x", r"unknown format '\.csv'; use \.parquet, \.jsonl or \.json"),
        ("a.parquet", b"not parquet", "not readable parquet"),
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt"\n', "invalid JSON at line 2, column 10"),
        ("a.json", b'[1,\n2,\n"x]', "invalid JSON at line 3"),
        ("b.json", b'{"prompt": "x"}', r"must contain a JSON list.*suffix \.jsonl"),
        ("b.jsonl", b"\xff\xfe", "not UTF-8"),
        ("c.jsonl", b"\n", "no rows in"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=message):
            load(tmp_path / name)


def test_invalid_settings_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [row(0)])
    with pytest.raises(ConfigError, match=r"data\.truncation 'mid' is unknown"):
        load_prompts(path, char_tokenizer(), max_prompt_length=9, truncation="mid")
    with pytest.raises(ConfigError, match=r"data\.max_prompt_length 0"):
        load_prompts(path, char_tokenizer(), max_prompt_length=0)


@pytest.mark.parametrize(
    ("line", "part"),
    [
        (b'{"prompt": "\\ud800"}', "row 0: column 'prompt': '\\ud800' has a lone surrogate"),
        (b'{"\\ud800": 1}', "row 0: column '\\ud800': '\\ud800' has a lone surrogate"),
        (b'{"x": ' + b"9" * 6000 + b"}", "an integer has too many digits; check the file"),
        (b'{"x": ' + b"[" * 5000 + b"]" * 5000 + b"}", "it is nested too deeply; check the file"),
        (
            b'{"x": ' + b"[" * 90 + b"]" * 90 + b"}",
            "row 0: column 'x': it is nested deeper than 64",
        ),
    ],
)
def test_rows_that_nothing_can_hold_name_file_and_column(
    tmp_path: Path, line: bytes, part: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(line)
    with pytest.raises(DataError) as caught:
        load_prompts(path, char_tokenizer(), max_prompt_length=9)
    assert str(path) in str(caught.value)
    assert part in str(caught.value)


def test_integers_of_a_thousand_digits_are_ground_truths(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a", "ground_truth": ' + "9" * 1000 + "}")
    (prompt,) = load_prompts(path, char_tokenizer(), max_prompt_length=9)
    assert prompt.ground_truth == 10**1000 - 1


def test_parquet_text_that_is_not_utf8_names_the_file(tmp_path: Path) -> None:
    data = pyarrow.array([b"a\xff"], pyarrow.binary())
    text = pyarrow.Array.from_buffers(pyarrow.string(), 1, data.buffers())
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": text}), path)
    with pytest.raises(DataError, match=r"a\.parquet: it is not UTF-8 text .*; check the file"):
        load_prompts(path, char_tokenizer(), max_prompt_length=9)


def test_a_file_name_that_is_too_long_is_refused() -> None:
    with pytest.raises(DataError, match="File name too long; check the file"):
        load_prompts("a" * 5000 + ".jsonl", char_tokenizer(), max_prompt_length=9)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 1/0 }}", "ZeroDivisionError: division by zero"),
        ("{{ messages[0]['content'] + 5 }}", "TypeError: can only concatenate str"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError: it is nested too"),
        ("{{ raise_exception('no' * 9999) }}", "(19998 characters)"),
    ],
)
def test_rows_on_which_a_template_raises_anything_are_left_out(
    tmp_path: Path, template: str, reason: str
) -> None:
    path = write(tmp_path / "a.jsonl", [row(0)])
    reader = PromptReader(tokenizer=char_tokenizer(template), max_prompt_length=100)
    with pytest.raises(DataError, match="no prompt is left") as caught:
        inspect_prompts(path, reader)
    assert reason in str(caught.value)
    assert len(str(caught.value)) < 1000
