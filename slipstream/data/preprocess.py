"""Converts public data sets from their own formats to files in verl's row schema.

    gsm8k   Cobbe et al. 2021: rows with question and answer, whose last line is `#### 72`
    math    Hendrycks et al. 2021: rows with problem, level, type and solution, whose last box is
            the answer; or one JSON file per row; or MATH-500's rows, which have an `answer`

Knows formats, not tokenizers. Called by `slipstream data`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from slipstream.data.rows import DataRow, missing_column, read_rows
from slipstream.errors import DataError, did_you_mean
from slipstream.rewards.scorers.boxed import last_boxed

SPLITS = ("train", "test")

_SUFFIXES = (".parquet", ".jsonl", ".json")
_NAME = re.compile(rf"({'|'.join(SPLITS)})(-\d+-of-\d+)?\.\w+")
_GSM8K_ANSWER = re.compile(r"####\s*(-?[\d.,]+)\s*$")


def gsm8k_row(row: DataRow, split: str) -> dict[str, Any]:
    """Convert a row. Raises DataError if question, answer, or the final number is missing."""
    question, answer = _text(row, "question"), _text(row, "answer")
    found = _GSM8K_ANSWER.search(answer)
    if found is None:
        raise DataError(
            f"{row.where}: the answer does not end with '#### NUMBER': {answer[-60:]!r}"
        )
    return _row(
        row,
        split,
        data_source="openai/gsm8k",
        prompt=f"{question}\nThink step by step, and end with the final answer after ####.",
        ground_truth=found[1].replace(",", ""),
        question=question,
        answer=answer,
    )


def math_row(row: DataRow, split: str) -> dict[str, Any]:
    """Convert a row. Raises DataError if problem, solution, or an answer is missing."""
    problem, solution = _text(row, "problem"), _text(row, "solution")
    answer = row.values.get("answer")
    if answer is None:
        answer = last_boxed(solution)
    if answer is None:
        raise DataError(f"{row.where}: the solution has no boxed answer: {solution[-60:]!r}")
    return _row(
        row,
        split,
        data_source="DigitalLearningGmbH/MATH-lighteval",
        prompt=f"{problem}\nThink step by step, and put the final answer into \\boxed{{}}.",
        ground_truth=str(answer),
        level=str(row.values.get("level") or ""),
        type=str(row.values.get("type") or row.values.get("subject") or ""),
    )


CONVERTERS: dict[str, Callable[[DataRow, str], dict[str, Any]]] = {
    "gsm8k": gsm8k_row,
    "math": math_row,
}


def convert(name: str, source: Path, output: Path) -> dict[Path, int]:
    """Write `output`/train.parquet and test.parquet from `source`. Returns the rows of each file.

    `source` is a file, or a folder that contains files or folders named by split. The split is the
    one that the name of a file starts with (train if neither). Raises DataError, naming file and
    row, for anything that cannot be read.
    """
    convert_row = CONVERTERS.get(name)
    if convert_row is None:
        raise DataError(
            f"data set {name!r} is not known{did_you_mean(name, CONVERTERS)} (known: "
            f"{', '.join(CONVERTERS)})"
        )
    written: dict[Path, int] = {}
    for split, files in _splits(source.expanduser()).items():
        rows = [convert_row(row, split) for row in _numbered(files)]
        path = output / f"{split}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        written[path] = len(rows)
    return written


def _splits(source: Path) -> dict[str, list[Path]]:
    if source.is_file():
        named = next((split for split in SPLITS if source.name.startswith(split)), "train")
        return {named: [source]}
    if not source.is_dir():
        raise DataError(f"{str(source)!r} does not exist: give a file or folder of the data set")
    found: dict[str, list[Path]] = {}
    roots: dict[Path, None] = {}
    for path in sorted(source.rglob("*")):
        place = _place(path, source)
        if place is not None:
            split, root = place
            roots[root] = None
            found.setdefault(split, []).append(path)
    if not found:
        raise DataError(
            f"{str(source)!r} has no .parquet, .jsonl or .json file named train or test, no shard "
            "of them (train-00000-of-00001.parquet), and no such file in a folder train or test"
        )
    if len(roots) > 1:
        raise DataError(
            f"{str(source)!r} contains several data sets; give one of: {', '.join(map(str, roots))}"
        )
    return {split: found[split] for split in SPLITS if split in found}


def _place(path: Path, source: Path) -> tuple[str, Path] | None:
    """Return the split of a file and the root folder of its data set; None for other files."""
    if path.suffix not in _SUFFIXES:
        return None
    parents = path.relative_to(source).parts[:-1]
    for depth, part in enumerate(parents):
        if part in SPLITS:
            return part, source.joinpath(*parents[:depth])
    named = _NAME.fullmatch(path.name)
    return (named[1], path.parent) if named else None


def _numbered(files: list[Path]) -> Iterator[DataRow]:
    """Yield the rows of all files. A JSON file may contain a single row."""
    tables = [path for path in files if not _is_one_row(path)]
    if tables:
        yield from read_rows(tables)
    for path in files:
        if path not in tables:
            yield DataRow(path, 0, json.loads(path.read_text(encoding="utf-8")), path.name)


def _is_one_row(path: Path) -> bool:
    if path.suffix != ".json":
        return False
    try:
        return isinstance(json.loads(path.read_text(encoding="utf-8")), dict)
    except (OSError, ValueError, RecursionError):
        return False  # reading it as a table gives a clear error


def _text(row: DataRow, key: str) -> str:
    value = row.values.get(key)
    if value is None:
        raise missing_column(row, key, "the source")
    if not isinstance(value, str):
        raise DataError(f"{row.where}: column {key!r} must be text, got {value!r}")
    return value


def _row(
    row: DataRow, split: str, *, data_source: str, prompt: str, ground_truth: str, **extra: str
) -> dict[str, Any]:
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": prompt}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"split": split, "index": row.number, "file": row.source, **extra},
    }
