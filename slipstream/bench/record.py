"""Rows of results: numbers with their spread, and the circumstances that they hold under.

Knows nothing about what is measured. Never imports torch. Used by all benchmarks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from slipstream.errors import DataError
from slipstream.metrics.machine import Machine, this_machine

__all__ = ["Machine", "ResultRow", "Spread", "median_of", "read_rows", "this_machine", "write_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """One quantity over `n` runs."""

    median: float
    min: float
    max: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        return cls(median=median(values), min=min(values), max=max(values), n=len(values))

    def scaled(self, factor: float) -> Spread:
        """The spread of `factor` times the values, `factor` > 0."""
        return Spread(
            median=factor * self.median, min=factor * self.min, max=factor * self.max, n=self.n
        )


def median_of(value: float | Spread) -> float:
    """The median of what may have been measured once or several times."""
    return value.median if isinstance(value, Spread) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRow:
    """One contender in one case.

    `seconds` is the wall time of one run. `values` are derived numbers, named with their unit;
    `settings` is what was run. `dtype` is empty and `threads` None where neither has a meaning.
    """

    benchmark: str
    case: str
    contender: str
    dtype: str
    threads: int | None
    seconds: Spread
    machine: Machine
    values: Mapping[str, float | Spread] = field(default_factory=dict)
    settings: Mapping[str, str | int | float | bool] = field(default_factory=dict)


def write_rows(path: Path, rows: Sequence[ResultRow], summary: Mapping[str, object] = {}) -> None:
    """Write `{**summary, "rows": [...]}` as JSON, making the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {**summary, "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(content, indent=2) + "\n")


def read_rows(path: Path) -> list[ResultRow]:
    """What `write_rows` wrote. Raises DataError where the file has no rows of that form."""
    try:
        return [_row(entry) for entry in json.loads(path.read_text())["rows"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} has no rows of a benchmark ({type(error).__name__}: {error}); give a file "
            "that `slipstream bench ... --json FILE` wrote"
        ) from error


def _row(entry: Mapping[str, Any]) -> ResultRow:
    machine = {**entry["machine"], "cpu_flags": tuple(entry["machine"]["cpu_flags"])}
    values = {
        name: Spread(**value) if isinstance(value, dict) else value
        for name, value in entry["values"].items()
    }
    given = {"seconds": Spread(**entry["seconds"]), "machine": Machine(**machine), "values": values}
    return ResultRow(**{**entry, **given})
