"""Arguments are checked against the schema, and the problem is a text for the policy."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.environment.tools.arguments import argument_problem

PROPERTIES = {
    "city": {"type": "string"},
    "count": {"type": "integer"},
    "unit": {"type": "string", "enum": ["km", "mi"]},
    "both": {"type": ["string", "null"]},
    "maybe": {"type": "number", "nullable": True},
    "flag": {"type": "boolean"},
    "any": {},
}
SCHEMA: dict[str, Any] = {
    "function": {"name": "f", "parameters": {"properties": PROPERTIES, "required": ["city"]}}
}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"count": 3},
        {"count": 3.0},
        {"unit": "km"},
        {"both": None},
        {"maybe": None},
        {"maybe": 2},
        {"flag": True},
        {"any": [1, {}]},
    ],
)
def test_fitting_arguments_have_no_problem(more: dict[str, Any]) -> None:
    assert argument_problem(SCHEMA, {"city": "Graz", **more}) is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "'city' is missing"),
        ({"city": 3}, "'city' must be of type string"),
        ({"city": "a", "count": "3"}, "'count' must be of type integer"),
        ({"city": "a", "count": 3.5}, "'count'"),
        ({"city": "a", "count": True}, "'count'"),
        ({"city": "a", "unit": "m"}, "'km', 'mi'"),
        ({"city": "a", "flag": 1}, "'flag'"),
        ({"city": "a", "coumt": 1}, "did you mean count"),
    ],
)
def test_a_problem_names_the_argument(arguments: dict[str, Any], words: str) -> None:
    assert words in (argument_problem(SCHEMA, arguments) or "")


def test_a_schema_without_parameters_accepts_no_argument() -> None:
    assert argument_problem({"function": {"name": "f"}}, {}) is None
    assert argument_problem({"function": {"name": "f"}}, {"x": 1}) is not None


def test_additional_properties_are_accepted_if_the_schema_says_so() -> None:
    schema = {"function": {"name": "f", "parameters": {"additionalProperties": True}}}
    assert argument_problem(schema, {"x": 1}) is None
