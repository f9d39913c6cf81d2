"""Types for annotating options: numbers with ranges, and free-form mappings.

The schema modules use them as annotations, and `tree` checks values against them. This module does
not know any option.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any


@dataclass(frozen=True, slots=True)
class Range:
    """Bounds of a number. `above` excludes `low` itself, and `below` excludes `high` itself."""

    low: float | None = None
    high: float | None = None
    above: bool = False
    below: bool = False

    def holds(self, value: float) -> bool:
        if self.low is not None and (value < self.low or (self.above and value == self.low)):
            return False
        if self.high is None:
            return True
        return value < self.high if self.below else value <= self.high

    def __str__(self) -> str:
        low = "" if self.low is None else f"{'above' if self.above else 'at least'} {self.low:g}"
        high = "" if self.high is None else f"{'below' if self.below else 'at most'} {self.high:g}"
        return " and ".join(part for part in (low, high) if part)


PositiveInt = Annotated[int, Range(low=1)]
NonNegativeInt = Annotated[int, Range(low=0)]
CountOrOff = Annotated[int, Range(low=-1)]
"""A count or a period; -1 means no limit or never."""
PositiveFloat = Annotated[float, Range(low=0, above=True)]
NonNegativeFloat = Annotated[float, Range(low=0)]
Fraction = Annotated[float, Range(low=0, high=1)]
BelowOne = Annotated[float, Range(low=0, high=1, below=True)]


class FrozenMapping(Mapping[str, Any]):
    """An immutable mapping with string keys: the value of a free-form option (`reward_kwargs`).

    Access returns copies of nested lists and dictionaries. So user code gets plain types, and
    cannot change the configuration. It can be pickled.
    """

    __slots__ = ("_data",)

    def __init__(self, data: Mapping[str, Any] | None = None) -> None:
        self._data: dict[str, Any] = copy.deepcopy(dict(data or {}))

    def __getitem__(self, key: str) -> Any:
        return copy.deepcopy(self._data[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def __repr__(self) -> str:
        return f"FrozenMapping({self._data!r})"
