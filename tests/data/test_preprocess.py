"""Public data sets in their published formats are converted to verl's rows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from slipstream.cli import main
from slipstream.data.datasets import load_prompts
from slipstream.data.preprocess import convert
from slipstream.errors import DataError
from slipstream.rewards.functions import default_compute_score
from tests.data.helpers import char_tokenizer

GSM8K = [
    {"question": "Two and two?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"},
    {"question": "How many?", "answer": "Many.\n#### 1,234"},
    {"question": "Below zero?", "answer": "Yes.\n#### -5 "},
]
MATH = [
    {
        "problem": "Half?",
        "level": "Level 1",
        "type": "Algebra",
        "solution": r"So $\boxed{2}$, no: $\boxed{\frac{1}{2}}$.",
    },
    {"problem": "Three?", "level": "Level 5", "type": "Geometry", "solution": r"\fbox{3}"},
]


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def test_gsm8k_files_of_both_splits_are_converted(tmp_path: Path) -> None:
    lines(tmp_path / "raw" / "main" / "train.jsonl", GSM8K)
    table = pyarrow.Table.from_pylist(GSM8K[:1])
    pyarrow.parquet.write_table(table, tmp_path / "raw" / "main" / "test-00000-of-00001.parquet")
    assert convert("gsm8k", tmp_path / "raw", tmp_path / "out") == {
        tmp_path / "out" / "train.parquet": 3,
        tmp_path / "out" / "test.parquet": 1,
    }
    prompts = load_prompts(
        tmp_path / "out" / "train.parquet", char_tokenizer(), max_prompt_length=999
    )
    assert [p.ground_truth for p in prompts] == ["4", "1234", "-5"]
    assert {p.data_source for p in prompts} == {"openai/gsm8k"}
    assert prompts[1].extra_info["question"] == "How many?"
    assert (prompts[2].extra_info["split"], prompts[2].extra_info["index"]) == ("train", 2)
    for prompt, row in zip(prompts, GSM8K, strict=True):
        assert (
            default_compute_score("openai/gsm8k", row["answer"].strip(), prompt.ground_truth) == 1
        )


def test_math_files_with_one_problem_each_are_converted(tmp_path: Path) -> None:
    for number, row in enumerate(MATH):
        path = tmp_path / "MATH" / "train" / row["type"].lower() / f"{number}.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(row))
    convert("math", tmp_path / "MATH", tmp_path / "out")
    prompts = load_prompts(
        tmp_path / "out" / "train.parquet", char_tokenizer(), max_prompt_length=999
    )
    assert [p.ground_truth for p in prompts] == [r"\frac{1}{2}", "3"]
    assert [p.extra_info["level"] for p in prompts] == ["Level 1", "Level 5"]
    for prompt, row in zip(prompts, MATH, strict=True):
        source = prompt.data_source
        assert default_compute_score(source, row["solution"], prompt.ground_truth) == 1.0


def test_math_500_answers_are_used(tmp_path: Path) -> None:
    row = {"problem": "p", "solution": "no box", "answer": "7", "subject": "Algebra", "level": 2}
    source = lines(tmp_path / "test.jsonl", [row])
    assert list(convert("math", source, tmp_path)) == [tmp_path / "test.parquet"]
    (prompt,) = load_prompts(tmp_path / "test.parquet", char_tokenizer(), max_prompt_length=999)
    assert (prompt.ground_truth, prompt.extra_info["type"], prompt.extra_info["level"]) == (
        "7",
        "Algebra",
        "2",
    )


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("gsm8k", {"question": "q"}, "row 0 has no column 'answer'; columns found: question"),
        ("gsm8k", {"question": "q", "answer": "4"}, "does not end with '#### NUMBER': '4'"),
        ("gsm8k", {"question": 3, "answer": "#### 4"}, "column 'question' must be text, got 3"),
        ("math", {"problem": "p", "solution": "s"}, "the solution has no boxed answer: 's'"),
    ],
)
def test_invalid_rows_are_refused(
    tmp_path: Path, name: str, row: dict[str, Any], message: str
) -> None:
    path = lines(tmp_path / "train.jsonl", [row])
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        convert(name, path, tmp_path / "out")
    assert str(path) in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_invalid_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="data set 'gsm' is not known; did you mean gsm8k"):
        convert("gsm", tmp_path, tmp_path)
    with pytest.raises(DataError, match="does not exist: give a file or folder"):
        convert("math", tmp_path / "absent", tmp_path)
    with pytest.raises(
        DataError, match=r"has no \.parquet, \.jsonl or \.json file named train or test"
    ):
        convert("math", tmp_path, tmp_path)


def test_variants_of_a_data_set_are_not_mixed(tmp_path: Path) -> None:
    lines(tmp_path / "train.jsonl", GSM8K)
    lines(tmp_path / "train_socratic.jsonl", GSM8K)
    assert convert("gsm8k", tmp_path, tmp_path / "out") == {tmp_path / "out" / "train.parquet": 3}
    for name in ("main", "socratic"):
        lines(tmp_path / "hub" / name / "train.jsonl", GSM8K)
    with pytest.raises(DataError, match=r"several data sets; give one of: .*main, .*socratic"):
        convert("gsm8k", tmp_path / "hub", tmp_path / "out")
    main_only = convert("gsm8k", tmp_path / "hub" / "main", tmp_path / "out")
    assert list(main_only.values()) == [3]


def test_the_command_converts_a_data_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = lines(tmp_path / "train.jsonl", GSM8K)
    assert main(["data", "gsm8k", str(source), "--output", str(tmp_path / "out")]) == 0
    assert "3 rows" in capsys.readouterr().out
    assert main(["data", "gsm", str(source), "--output", str(tmp_path)]) == 3
    assert "did you mean gsm8k" in capsys.readouterr().err
