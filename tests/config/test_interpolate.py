"""Interpolations in settings written for VERL."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.config.interpolate import resolve_in_sources
from slipstream.config.sources import Assignment


def resolved(**values: Any) -> dict[str, Any]:
    assignments = [Assignment(key.replace("__", "."), v, "test") for key, v in values.items()]
    return {one.key: one.value for one in resolve_in_sources(assignments)}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${mine.size}", 7),  # a key that is none of ours
        ("${.other}", "text"),  # a key of the same section
        ("${oc.select:mine.nothing,3}", 3),
        ("${oc.select:mine.nothing}", None),
        ("${data.max_prompt_length}", 512),  # a default of ours
        ("runs/${mine.other}-${mine.size}", "runs/text-7"),
        (["${mine.size}", 1], [7, 1]),
        (r"\${mine.size}", r"\${mine.size}"),  # text that is no interpolation
    ],
)
def test_interpolations_are_resolved_among_all_sources(text: Any, value: Any) -> None:
    found = resolved(mine__size=7, mine__other="text", mine__asked=text)
    assert found["mine.asked"] == value


def test_the_last_assignment_counts() -> None:
    first, last = Assignment("mine.size", 1, "file"), Assignment("mine.size", 2, "line")
    asked = Assignment("mine.asked", "${mine.size}", "file")
    assert [one.value for one in resolve_in_sources([first, asked, last])] == [1, 2, 2]


def test_interpolations_of_nothing_stay_for_the_later_error() -> None:
    assert resolved(mine__asked="${mine.nothing}") == {"mine.asked": "${mine.nothing}"}


@pytest.mark.parametrize("text", ["a${", "${mine.size", ["${}"], {"a": "${x"}])
def test_texts_with_a_syntax_error_stay_for_the_later_error(text: Any) -> None:
    found = resolved(mine__size=7, mine__broken=text, mine__asked="${mine.size}")
    assert found == {"mine.size": 7, "mine.broken": text, "mine.asked": 7}


def test_an_alias_that_names_our_key_stays() -> None:
    key = "actor_rollout_ref__rollout__response_length"
    text = "${oc.select:data.max_response_length,512}"
    assert list(resolved(**{key: text}).values()) == [text]


def test_resolvers_of_hydra_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_FOLDER", "there")
    found = resolved(mine__asked="${oc.env:MY_FOLDER}/${now:%Y}")["mine.asked"]
    assert found.startswith("there/20")
    assert len(found) == len("there/2000")
