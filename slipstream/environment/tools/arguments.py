"""Checks the arguments of a call against the schema of its tool.

It checks names, required parameters, types and enumerations. Tools check deeper conditions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.environment.protocol import ToolSchema
from slipstream.errors import did_you_mean
from slipstream.reading import shown

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (Mapping,),
    "null": (type(None),),
}


def argument_problem(schema: ToolSchema, arguments: Mapping[str, Any]) -> str | None:
    """Return why the arguments do not fit, as a text for the policy; None if they fit."""
    parameters = schema["function"].get("parameters") or {}
    properties = parameters.get("properties") or {}
    for name in parameters.get("required") or ():
        if name not in arguments:
            return f"the argument {name!r} is missing"
    for name, value in arguments.items():
        if name not in properties:
            if parameters.get("additionalProperties"):
                continue
            return f"there is no argument {name!r}{did_you_mean(name, properties)}"
        problem = _problem(properties[name], value)
        if problem is not None:
            return f"the argument {name!r} must be {problem}, not {shown(value, 80)}"
    return None


def _problem(schema: Any, value: Any) -> str | None:
    if not isinstance(schema, Mapping):
        return None
    choices = schema.get("enum")
    if isinstance(choices, list | tuple) and value not in choices:
        return f"one of {', '.join(map(repr, choices))}"
    kinds = schema.get("type")
    named = [kinds] if isinstance(kinds, str) else list(kinds or ())
    known = [kind for kind in named if kind in _TYPES]
    if schema.get("nullable"):
        known.append("null")
    if not known or any(_is(value, kind) for kind in known):
        return None
    return f"of type {' or '.join(known)}"


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool) and kind != "boolean":
        return False
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[kind])
