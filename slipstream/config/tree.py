"""Lists the options of the schema, and converts between typed trees and plain dictionaries.

`options` lists all options. `to_dict` converts a typed tree to plain Python. `from_dict` checks a
plain tree against the annotations, and reports all values of the wrong type at once. This module
does not know what options mean. Used by `load`, `docs` and `validate`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from slipstream.config.fields import FrozenMapping, Range
from slipstream.config.schema import Config
from slipstream.reading import MOST_SHOWN, shown

_NEEDS_QUOTES = re.compile(
    r"""^$|[\s,{}\[\]:='"\\]|^[-+]?[0-9._]+(e[-+]?[0-9]+)?$|^(true|false|null|nan|[-+]?inf)$""",
    re.IGNORECASE,
)
"""Pattern of text that Hydra would read as another type or as several tokens."""
_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One dotted key. `section` is the dataclass of a section, and None for an option with a value.

    `nullable` is true if the value may be null.
    """

    key: str
    annotation: Any
    default: Any
    owner: type
    section: type | None = None
    nullable: bool = False

    @property
    def name(self) -> str:
        return self.key.rpartition(".")[2]

    @property
    def free_form(self) -> bool:
        return get_origin(self.annotation) is Mapping

    @property
    def takes_text(self) -> bool:
        """Whether the value may be a string or a list of strings."""
        return any(
            member is str or (get_origin(member) is tuple and str in _members(get_args(member)[0]))
            for member in _members(self.annotation)
        )


def _members(annotation: Any) -> tuple[Any, ...]:
    """Return the alternatives of a union, or the annotation itself."""
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)


def _section_of(annotation: Any) -> type | None:
    for member in _members(annotation):
        if isinstance(member, type) and dataclasses.is_dataclass(member):
            return member
    return None


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


@functools.cache
def options() -> dict[str, Option]:
    """Return all keys of the tree, including sections, in the order of the schema."""
    found: dict[str, Option] = {}

    def visit(owner: type, instance: Any, prefix: str) -> None:
        hints = get_type_hints(owner, include_extras=True)
        for field in dataclasses.fields(owner):
            key = f"{prefix}{field.name}"
            section = _section_of(hints[field.name])
            default = getattr(instance, field.name)
            found[key] = Option(
                key=key,
                annotation=hints[field.name],
                default=default,
                owner=owner,
                section=section,
                nullable=type(None) in _members(hints[field.name]),
            )
            if section is not None:
                visit(section, section() if default is None else default, f"{key}.")

    visit(Config, Config(), "")
    return found


def type_text(annotation: Any) -> str:
    """Return an annotation in words: `an integer, at least 1, or null`."""
    members = _members(annotation)
    words = [_member_text(member) for member in members if member is not type(None)]
    if type(None) in members:
        words.append("null")
    return ", or ".join(words)


def _member_text(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        base, bounds = get_args(annotation)[:2]
        return f"{_member_text(base)}, {bounds}"
    if origin is Literal:
        names = [str(a).lower() if isinstance(a, bool) else str(a) for a in get_args(annotation)]
        return names[0] if len(names) == 1 else "one of " + ", ".join(names)
    if origin is tuple:
        items = get_args(annotation)
        count = "" if Ellipsis in items else f"{len(items)} "
        single = ", or one string" if Ellipsis in items and items[0] is str else ""
        return f"a list of {count}{_items_text(items[0])}{single}"
    if origin is Mapping:
        return "a mapping"
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return "a section"
    return _NAMES[annotation]


def _items_text(annotation: Any) -> str:
    """Return the items of a list in words: `numbers, each above 0`."""
    members = _members(annotation)
    if len(members) > 1:
        return " or ".join(map(_items_text, members))
    origin = get_origin(annotation)
    if origin is Annotated:
        base, bounds = get_args(annotation)[:2]
        return f"{_items_text(base)}, each {bounds}"
    return {int: "integers", float: "numbers", str: "strings"}[annotation]


def show(value: Any) -> str:
    """Return a value as a user would type it after `key=`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(show(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{show(item)}" for key, item in value.items()) + "}"
    # Python does not convert integers of thousands of digits to text.
    text = shown(value) if isinstance(value, int) else str(value)
    if isinstance(value, str) and _NEEDS_QUOTES.search(text):
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return text


def is_count(value: Any) -> bool:
    """Return whether `value` is an integer of at least 1. True is no integer here."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def example(option: Option) -> str:
    """Return a valid assignment, quoted for the shell: the default, or a sample if it is null."""
    value = option.default
    if value is None:
        value = _sample(next(m for m in _members(option.annotation) if m is not type(None)))
    text = show(value)
    if "'" in text:
        return f'{option.key}="{text}"'
    return f"{option.key}='{text}'" if "$" in text or "{" in text else f"{option.key}={text}"


def _sample(annotation: Any) -> Any:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _sample(get_args(annotation)[0])
    if origin is Literal:
        return get_args(annotation)[0]
    if origin is tuple:
        return [_sample(get_args(annotation)[0])]
    return {int: 1, float: 0.5, bool: True, str: "name"}.get(annotation, {})


class _MismatchError(Exception):
    """A value does not fit its annotation."""


def _number(value: Any, annotation: Any) -> Any:
    allowed = (int,) if annotation is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, allowed):
        raise _MismatchError
    if annotation is int:
        return value
    try:
        number = float(value)
    except OverflowError:
        raise _MismatchError from None
    if not math.isfinite(number):
        raise _MismatchError
    return number


def _sequence(value: Any, annotation: Any) -> tuple[Any, ...]:
    items = get_args(annotation)
    if Ellipsis in items:
        if isinstance(value, str):
            value = [value]
        if not isinstance(value, (list, tuple)):
            raise _MismatchError
        return tuple(_convert(item, items[0]) for item in value)
    if not isinstance(value, (list, tuple)) or len(value) != len(items):
        raise _MismatchError
    return tuple(_convert(item, kind) for item, kind in zip(value, items, strict=True))


def _convert_member(value: Any, annotation: Any) -> Any:
    origin = get_origin(annotation)
    if origin is Annotated:
        base, bounds = get_args(annotation)[:2]
        converted = _convert_member(value, base)
        if isinstance(bounds, Range) and not bounds.holds(converted):
            raise _MismatchError
        return converted
    if origin is Literal:
        for choice in get_args(annotation):
            if type(value) is type(choice) and value == choice:
                return value
        raise _MismatchError
    if origin is tuple:
        return _sequence(value, annotation)
    if origin is Mapping:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise _MismatchError
        return FrozenMapping(value)
    if annotation in (int, float):
        return _number(value, annotation)
    if type(value) is annotation or (annotation is type(None) and value is None):
        return value
    raise _MismatchError


def _convert(value: Any, annotation: Any) -> Any:
    for member in _members(annotation):
        try:
            return _convert_member(value, member)
        except _MismatchError:
            continue
    raise _MismatchError


def _cut(text: str) -> str:
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def _mismatch(option: Option, value: Any) -> str:
    message = (
        f"{option.key}: expected {type_text(option.annotation)}, got {_cut(show(value))} "
        f"({type(value).__name__}); for example {example(option)}"
    )
    if option.takes_text and isinstance(value, (int, float)):
        message += f"""; a string that looks like a number needs quotes: {option.key}="'...'" """
    return message.rstrip()


def from_dict(tree: Mapping[str, Any]) -> tuple[Config, list[str]]:
    """Check a plain tree and build the typed tree.

    Missing options get their defaults, such as options that are newer than the plain tree. Returns
    the typed tree, and one message per value of the wrong type. A value of the wrong type is
    replaced by the default, so after any message use the tree only to find more problems.
    """
    problems: list[str] = []

    def build(section: type, values: Any, prefix: str) -> Any:
        arguments: dict[str, Any] = {}
        if not isinstance(values, Mapping):
            problems.append(f"{prefix.rstrip('.')}: expected a section, got {_cut(show(values))}")
            values = {}
        for field in dataclasses.fields(section):
            if field.name not in values:
                arguments[field.name] = _default(field)
                continue
            option = options()[f"{prefix}{field.name}"]
            value = values[field.name]
            if option.section is not None:
                if value is None and option.nullable:
                    arguments[field.name] = None
                else:
                    arguments[field.name] = build(option.section, value, f"{option.key}.")
                continue
            try:
                arguments[field.name] = _convert(value, option.annotation)
            except _MismatchError:
                problems.append(_mismatch(option, value))
                arguments[field.name] = _default(field)
        return section(**arguments)

    config: Config = build(Config, tree, "")
    return config, problems


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield `(dotted key, value)` of each leaf of a plain tree. An empty mapping is a leaf."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def to_dict(config: Any) -> dict[str, Any]:
    """Convert a typed tree, or a part of it, to plain dictionaries, lists and scalars."""
    plain: dict[str, Any] = _plain(config)
    return plain


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
