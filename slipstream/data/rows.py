"""Reads rows of data set files in order, with their origin.

Formats: parquet, JSON lines, JSON, and folders written by `datasets`. Knows files and columns, not
prompts or tokens. Called by `datasets` and `sft`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from slipstream.data.keyed import KeyedDraws
from slipstream.data.messages import with_text
from slipstream.errors import ConfigError, DataError
from slipstream.reading import reading, shown, shown_path, value_problem
from slipstream.types import Message

_REMEDY = "check the file, or set data.train_files (or data.val_files) to another one"


@dataclass(frozen=True, slots=True)
class DataRow:
    """One row: its columns and its origin. `number` counts from 0 within `file`.

    `source` is the file's name; if several files of a data set share it, their position is added.
    `where` is the name of the row in messages.
    """

    file: Path
    number: int
    values: dict[str, Any]
    source: str
    where: str = ""

    def __post_init__(self) -> None:
        if not self.where:
            object.__setattr__(self, "where", f"{self.file}, row {self.number}")

    @property
    def uid(self) -> str:
        """An id that stays the same as long as the name of the file and its row order do."""
        return f"{self.source}:{self.number}"


def read_rows(files: str | Path | Sequence[str | Path]) -> list[DataRow]:
    """Return all rows of all files, in order. Raises DataError for a file that cannot be read."""
    paths = [files] if isinstance(files, str | Path) else list(files)
    if not paths:
        raise DataError("no data files: set data.train_files (or data.val_files)")
    names = Counter(Path(path).name for path in paths)
    rows = []
    for position, path in enumerate(Path(p).expanduser() for p in paths):
        source = path.name if names[path.name] == 1 else f"{position}-{path.name}"
        with reading(path, DataError, _REMEDY, noun="data file "):
            for number, values in enumerate(_read_file(path)):
                row = DataRow(path, number, values, source)
                _check_values(row)
                rows.append(row)
    if not rows:
        raise DataError(f"no rows in {', '.join(str(p) for p in paths)}")
    return rows


def count_rows(files: str | Path | Sequence[str | Path]) -> int:
    """Return the number of rows of all files. Raises DataError for a file that cannot be read."""
    paths = [files] if isinstance(files, str | Path) else list(files)
    count = 0
    for path in (Path(p).expanduser() for p in paths):
        with reading(path, DataError, _REMEDY, noun="data file "):
            if path.suffix == ".parquet" and path.is_file():
                count += pyarrow.parquet.ParquetFile(path).metadata.num_rows
            else:
                count += sum(1 for _ in _read_file(path))
    return count


def _check_values(row: DataRow) -> None:
    """Raise DataError for values that no prompt, score or record can hold."""
    for key, value in row.values.items():
        if problem := value_problem([key, value]):
            raise DataError(
                f"{shown_path(row.file)}, row {row.number}: column {shown(key)}: {problem}; remove "
                "the row or correct the value"
            )


def subset(rows: list[DataRow], *, max_samples: int, seed: int | None) -> list[DataRow]:
    """Return at most `max_samples` rows (-1: all): the first, or with `seed` a random choice.

    The rows stay in file order.
    """
    if max_samples < -1 or max_samples == 0:
        raise ConfigError(f"max_samples {max_samples} must be -1 (all) or at least 1")
    if max_samples == -1 or max_samples >= len(rows):
        return rows
    if seed is None:
        return rows[:max_samples]
    chosen = KeyedDraws("row-subset", seed).shuffled(range(len(rows)))[:max_samples]
    return [rows[i] for i in sorted(chosen)]


def missing_column(row: DataRow, key: str, setting: str) -> DataError:
    """Return the error for a row without a value in column `key`, which `setting` names."""
    if key in row.values:
        return null_column(row, key)
    found = ", ".join(row.values) or "none"
    return DataError(
        f"{row.where} has no column {key!r}; columns found: {found}. Set {setting} to the "
        "name of the column"
    )


def null_column(row: DataRow, key: str) -> DataError:
    """Return the error for a row whose column `key` is null."""
    return DataError(f"{row.where}: column {key!r} is null; remove the row, or give it a value")


def as_messages(row: DataRow, key: str) -> list[Message]:
    """Return the column `key` as chat messages with texts as contents (`messages.with_text`).

    Raises DataError if it has another form.
    """
    value = row.values[key]
    if not isinstance(value, list) or not value or not all(isinstance(m, dict) for m in value):
        raise DataError(
            f"{row.where}: column {key!r} must be a non-empty list of messages "
            f"({{'role': ..., 'content': ...}}), got {_short(value)}"
        )
    messages = []
    for turn, message in enumerate(value):
        where = f"{row.where}: column {key!r}, message {turn}"
        # Parquet gives every message the union of all keys; missing keys are read as None.
        given = {k: v for k, v in message.items() if v is not None}
        if not isinstance(given.get("role"), str) or not ({"content", "tool_calls"} & set(message)):
            raise DataError(f"{where} needs 'role' and 'content', got {_short(message)}")
        messages.append(with_text(given, where))
    return messages


def mapping(row: DataRow, key: str) -> dict[str, Any]:
    """Return the object in column `key`, or an empty one. Raises DataError for another type."""
    value = row.values.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise DataError(
            f"{row.where}: column {key!r} must be an object, got {type(value).__name__}: "
            f"{_short(value)}"
        )
    return value


def ground_truth_of(row: DataRow) -> Any:
    """Return `reward_model.ground_truth` (verl), else the column `ground_truth` (TRL)."""
    truth = mapping(row, "reward_model").get("ground_truth")
    return row.values.get("ground_truth") if truth is None else truth


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # such as an integer with too many digits
        return shown(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


_SAVED, _SAVED_SPLITS = "state.json", "dataset_dict.json"
"""Files that mark a folder written by `datasets`: one data set, or several splits."""


def _read_file(path: Path) -> Iterator[dict[str, Any]]:
    if path.is_dir():
        return _read_folder(path)
    if not path.is_file():
        raise DataError(
            f"data file {str(path)!r} does not exist: check data.train_files and data.val_files"
        )
    suffix = path.suffix.lower()
    if suffix in (".parquet", ".pq"):
        return iter(_read_parquet(path))
    if suffix in (".jsonl", ".ndjson"):
        return _read_json_lines(path)
    if suffix == ".json":
        return _read_json(path)
    raise DataError(
        f"data file {str(path)!r}: unknown format {suffix!r}; use .parquet, .jsonl or .json"
    )


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"data file {str(path)!r} is not readable parquet: {error}") from error
    return rows


def _read_folder(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows that `Dataset.save_to_disk` wrote: Arrow streams listed in its state file."""
    if (path / _SAVED_SPLITS).is_file():
        splits = ", ".join(str(path / s) for s in sorted(_saved(path, _SAVED_SPLITS, "splits")))
        raise DataError(f"data folder {str(path)!r} has several splits; give one of: {splits}")
    if not (path / _SAVED).is_file():
        raise DataError(
            f"data folder {str(path)!r} was not written by datasets' save_to_disk (it has no "
            f"{_SAVED}); give its .parquet, .jsonl or .json files one by one"
        )
    for part in _saved(path, _SAVED, "_data_files"):
        file = path / part["filename"]
        try:
            with pyarrow.memory_map(str(file)) as source:
                for batch in pyarrow.ipc.open_stream(source):
                    yield from batch.to_pylist()
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(
                f"data file {str(file)!r} is not a readable Arrow file: {error}"
            ) from error


def _saved(path: Path, name: str, key: str) -> list[Any]:
    state = _parse(path / name, _text(path / name), 1)
    if not isinstance(state, dict) or not isinstance(state.get(key), list):
        raise DataError(f"data file {str(path / name)!r} has no list {key!r}; save the data again")
    found: list[Any] = state[key]
    return found


def _read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if line.strip():
            yield _object(path, f"line {number}", _parse(path, line, number))


def _read_json(path: Path) -> Iterator[dict[str, Any]]:
    values = _parse(path, _text(path), 1)
    if not isinstance(values, list):
        raise DataError(
            f"data file {str(path)!r} must contain a JSON list of rows, got "
            f"{type(values).__name__}; for one object per line use the suffix .jsonl"
        )
    for number, value in enumerate(values):
        yield _object(path, f"row {number}", value)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"data file {str(path)!r} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise DataError(f"data file {str(path)!r} cannot be read: {error}") from error


def _parse(path: Path, text: str, line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"data file {str(path)!r}: invalid JSON at line {line + error.lineno - 1}, column "
            f"{error.colno}: {error.msg}"
        ) from error


def _object(path: Path, where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(
            f"data file {str(path)!r}, {where}: a row must be a JSON object, got {_short(value)}"
        )
    return value
