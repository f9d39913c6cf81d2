"""Reads the values of a saved state, and refuses impossible values.

A `Saved` is a value of a state with its place in it. Its methods return the value if it is of the
expected kind, and raise an error otherwise: place, value, what is expected, and the remedy.
`restoring` adds the file to errors that do not know it.
"""

from __future__ import annotations

import contextlib
import math
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from slipstream.errors import CheckpointError, SlipstreamError
from slipstream.reading import reading, shown, shown_path, value_problem

T = TypeVar("T")

REMEDY = "resume from another checkpoint"

MOST = 1 << 53
"""No count is larger. A float can hold every integer up to here."""

MOST_PER_STEP = 1 << 24
"""No step draws more samples, takes more optimizer updates, or publishes more weights."""

MOST_REPEATS = 1 << 31
"""No prompt is drawn more often, and no sample is repeated more often."""


@contextlib.contextmanager
def restoring(part: Path | str) -> Iterator[None]:
    """Add the name of a file, or of a part of a state, to errors that the body raises.

    Errors of Slipstream keep their type. Others become a CheckpointError.
    """
    try:
        with reading(part, CheckpointError, REMEDY):
            yield
    except SlipstreamError as error:
        text = str(error)
        if text.startswith(shown_path(part)) or (isinstance(part, Path) and str(part) in text):
            raise
        raise type(error)(f"{shown_path(part)}: {text}") from error


@dataclass(frozen=True, slots=True)
class Saved:
    """A value of a saved state. `place` is where it is, such as `counts.updates`.

    `error` is the type of its refusals.
    """

    value: Any
    place: str = ""
    error: type[SlipstreamError] = CheckpointError

    def refuse(self, expected: str) -> NoReturn:
        """Raise the refusal: the value is not what is `expected`."""
        place = self.place or "the state"
        raise self.error(f"{place} is {_shown(self.value)}, not {expected}; {REMEDY}")

    def fields(self, *names: str, optional: tuple[str, ...] = ()) -> dict[str, Saved]:
        """Return the entries of an object. It has all of `names`, and no others but `optional`."""
        found = dict(self.items())
        for name in names:
            self.field(name)
        for name in found:
            if name not in names and name not in optional:
                known = ", ".join((*names, *optional))
                raise self.error(
                    f"entry {self._inner(name)!r} is unknown (known: {known}): another version of "
                    f"Slipstream wrote it, or it is corrupt; {REMEDY}"
                )
        return found

    def field(self, name: str) -> Saved:
        """Return one entry of an object."""
        found = dict(self.items())
        if name not in found:
            raise self.error(f"entry {self._inner(name)!r} is missing; {REMEDY}")
        return found[name]

    def items(self) -> Iterator[tuple[str, Saved]]:
        """Yield the entries of an object with any names."""
        if not isinstance(self.value, Mapping):
            self.refuse("an object")
        for name, value in self.value.items():
            if not isinstance(name, str):
                Saved(name, f"a name in {self.place or 'the state'}", self.error).refuse("text")
            yield name, Saved(value, self._inner(name), self.error)

    def elements(self, count: int | None = None) -> list[Saved]:
        """Return the elements of a list; `count` is their number, if it is known."""
        if not isinstance(self.value, list | tuple):
            self.refuse("a list")
        if count is not None and len(self.value) != count:
            place, found = self.place or "the state", len(self.value)
            raise self.error(f"{place} has {found} elements, not {count}; {REMEDY}")
        return [
            Saved(value, f"{self.place}[{index}]", self.error)
            for index, value in enumerate(self.value)
        ]

    def count(self, most: int = MOST, *, least: int = 0) -> int:
        """Return a whole number from `least` to `most`."""
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            self.refuse(f"a whole number from {least} to {most}")
        return int(value)

    def number(self, least: float = -math.inf, most: float = math.inf) -> float:
        """Return a finite number from `least` to `most`."""
        value = self.value
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or value_problem(value, setting=True) is not None
            or not math.isfinite(value)
            or not least <= value <= most
        ):
            bounds = "" if least == -math.inf else f" of at least {least:g}"
            bounds = bounds if most == math.inf else f" from {least:g} to {most:g}"
            self.refuse(f"a finite number{bounds}")
        return float(value)

    def text(self) -> str:
        """Return a text."""
        if not isinstance(self.value, str) or value_problem(self.value) is not None:
            self.refuse("text")
        return str(self.value)

    def tensor(self, like: Tensor, *, finite: bool = True) -> Tensor:
        """Return a tensor with the shape and dtype of `like`, and with finite values."""
        value = self.value
        expected = f"a tensor {_form(like)}"
        if not isinstance(value, Tensor) or _form(value) != _form(like):
            self.refuse(expected)
        if finite and not is_finite(value):
            raise self.error(f"{self.place} has NaN or infinite values; {REMEDY}")
        return value

    def tensors(self, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors with the names, shapes and dtypes of `like`, and with finite values."""
        found = self.fields(*like)
        return {name: found[name].tensor(tensor) for name, tensor in like.items()}

    def of(self, kind: Any) -> Any:
        """Return the value as `kind`: a type, a dataclass, or a hint such as `list[int]`.

        Supports what JSON can hold, enumerations and `None | ...`. `Any` accepts every value. An
        `int` may stand for a `float`; numbers are finite. A dataclass needs all fields that count
        for equality.
        """
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        if kind is Any:
            return self.value
        if origin in (typing.Union, types.UnionType):
            return self._one_of(arguments)
        if origin is list:
            if self._are_numbers(arguments[0]):
                return list(map(arguments[0], self.value))
            return [element.of(arguments[0]) for element in self.elements()]
        if origin is dict:
            return {name: value.of(arguments[1]) for name, value in self.items()}
        if kind is type(None):
            return self.value if self.value is None else self.refuse("null")
        if is_dataclass(kind):
            return self._as_dataclass(kind)
        if isinstance(kind, type) and issubclass(kind, Enum):
            known = [member.value for member in kind]
            return kind(self.value) if self.value in known else self.refuse(f"one of {known}")
        readers: dict[Any, Callable[[], Any]] = {
            int: lambda: self.count(least=-MOST),
            float: self.number,
            str: self.text,
        }
        if kind not in readers:
            raise TypeError(f"a saved value cannot be read as {kind}")
        return readers[kind]()

    def _one_of(self, kinds: tuple[Any, ...]) -> Any:
        if self.value is None and type(None) in kinds:
            return None
        left = [kind for kind in kinds if kind is not type(None)]
        for kind in left[:-1]:
            with contextlib.suppress(self.error):
                return self.of(kind)
        return self.of(left[-1])

    def _as_dataclass(self, kind: Any) -> Any:
        hints = typing.get_type_hints(kind)
        # Fields that do not count for equality are not saved.
        optional = tuple(f.name for f in fields(kind) if not f.compare)
        required = [f.name for f in fields(kind) if f.compare]
        found = self.fields(*required, optional=optional)
        values = {name: value.of(hints[name]) for name, value in found.items()}
        with restoring(self.place or kind.__name__):
            return kind(**values)

    def _are_numbers(self, kind: Any) -> bool:
        """Whether this is a list of numbers of a kind. Lists of tokens are long; this is fast."""
        known: dict[Any, set[type]] = {int: {int}, float: {int, float}}
        kinds = known.get(kind)
        if kinds is None or not isinstance(self.value, list) or not self.value:
            return False
        # The bounds exclude infinities, and the sum excludes NaN.
        return set(map(type, self.value)) <= kinds and bool(
            min(self.value) >= -MOST and max(self.value) <= MOST and math.isfinite(sum(self.value))
        )

    def _inner(self, name: str) -> str:
        name = shown_path(name, 60)
        return f"{self.place}.{name}" if self.place else name


def drawn_from(source: object) -> int | None:
    """Return how much was drawn from a source of samples since its start; None if it does not
    count that, in an attribute `drawn`."""
    drawn = getattr(source, "drawn", None)
    return drawn if type(drawn) is int else None


def check_finite(weights: Iterable[tuple[str, Tensor]]) -> None:
    """Raise CheckpointError if a weight, or this process's shard of it, is NaN or infinite."""
    for name, weight in weights:
        if not is_finite(getattr(weight, "to_local", lambda weight=weight: weight)()):
            raise CheckpointError(f"weight {name} has NaN or infinite values; {REMEDY}")


def is_finite(tensor: Tensor) -> bool:
    """Return whether no value is NaN or infinite. Works for dtypes without such values."""
    if not tensor.dtype.is_floating_point:
        return True
    # Sums need no copy. The sum of finite values may overflow, so only a finite one decides.
    total = tensor.sum(dtype=torch.float64)
    return bool(total.isfinite()) or bool(tensor.isfinite().all())


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _shown(value: Any) -> str:
    return f"a tensor {_form(value)}" if isinstance(value, Tensor) else shown(value)


def is_same(one: Any, other: Any) -> bool:
    """Return whether two JSON values are equal; 1, 1.0 and true are not."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(is_same(one[k], other[k]) for k in other)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    return type(one) is type(other) and bool(one == other)
