"""Tests of the tree of options: it is complete, documented, frozen, and can be pickled.

After you add or change an option, run `python -m tests.config.test_schema` to rewrite keys.txt.
"""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path

import pytest

from slipstream.config import Config, Hardware, load_config, to_dict
from slipstream.config.docs import field_doc
from slipstream.config.fields import FrozenMapping, Range
from slipstream.config.tree import from_dict, options, show, type_text

KEYS = Path(__file__).parent / "keys.txt"
CPU = Hardware(gpus=0)


def listed_keys() -> str:
    return "".join(
        f"{key} = {show(option.default)}  # {type_text(option.annotation)}\n"
        for key, option in options().items()
        if option.section is None or option.nullable
    )


def test_options_equal_the_committed_list() -> None:
    assert listed_keys() == KEYS.read_text(encoding="utf-8"), (
        "an option was added, removed or changed: python -m tests.config.test_schema"
    )


def test_every_option_and_section_is_documented() -> None:
    undocumented = [key for key, option in options().items() if not field_doc(option)]
    assert undocumented == []
    unfinished = [key for key, option in options().items() if not field_doc(option).endswith(".")]
    assert unfinished == []


def test_defaults_have_the_types_of_their_options() -> None:
    config, problems = from_dict(to_dict(Config()))
    assert problems == []
    assert config == Config()


def test_every_level_of_a_loaded_tree_is_frozen() -> None:
    config = load_config(["+reward_model.reward_kwargs.a=[1]"], recipe="tiny", hardware=CPU)

    def walk(node: object) -> int:
        count = 1
        assert dataclasses.is_dataclass(node)
        for field in dataclasses.fields(node):
            value = getattr(node, field.name)
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(node, field.name, value)
            assert not isinstance(value, (list, dict, set))
            if dataclasses.is_dataclass(value):
                count += walk(value)
        return count

    assert walk(config) == 1 + sum(option.section is not None for option in options().values())
    kwargs = config.reward_model.reward_kwargs
    kwargs["a"].append(2)
    assert kwargs["a"] == [1]
    with pytest.raises(TypeError):
        kwargs["b"] = 1  # type: ignore[index]


def test_a_tree_can_be_pickled() -> None:
    config = load_config(["+custom_reward_function.reward_kwargs={}"], recipe="tiny", hardware=CPU)
    assert pickle.loads(pickle.dumps(config)) == config


def test_frozen_mapping_returns_plain_copies() -> None:
    source = {"limits": {"low": 1}}
    mapping = FrozenMapping(source)
    source["limits"]["low"] = 5
    assert dict(mapping) == {"limits": {"low": 1}}
    assert type(mapping["limits"]) is dict
    assert mapping == FrozenMapping({"limits": {"low": 1}})
    assert len(mapping) == 1
    assert repr(mapping) == "FrozenMapping({'limits': {'low': 1}})"


@pytest.mark.parametrize(
    ("bounds", "value", "inside"),
    [
        (Range(low=1), 1, True),
        (Range(low=1), 0, False),
        (Range(low=0, above=True), 0, False),
        (Range(low=0, above=True), 1e-9, True),
        (Range(high=1), 1, True),
        (Range(high=1), 1.5, False),
    ],
)
def test_range_holds_values_within_its_bounds(bounds: Range, value: float, inside: bool) -> None:
    assert bounds.holds(value) is inside


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (1e-6, "1e-06"),
        ([1, "a b", "8_4"], "[1,'a b','8_4']"),
        ({"a": ["x"]}, "{a:[x]}"),
        ("1e5", "'1e5'"),
        ("", "''"),
        ("Null", "'Null'"),
        ("it's", r"'it\'s'"),
        ("a/b-c.d", "a/b-c.d"),
    ],
)
def test_hydra_reads_shown_values_back(value: object, text: str) -> None:
    assert show(value) == text
    key = "reward_model.reward_kwargs.x"
    loaded = load_config([f"+{key}={text}"], recipe="tiny", hardware=CPU)
    assert loaded.reward_model.reward_kwargs["x"] == value


def test_range_as_text() -> None:
    assert str(Range(low=0, high=1)) == "at least 0 and at most 1"
    assert str(Range(low=0, above=True)) == "above 0"


if __name__ == "__main__":
    KEYS.write_text(listed_keys(), encoding="utf-8")


def test_plain_trees_with_odd_sections_are_reported() -> None:
    odds: tuple[object, ...] = (5, "a", [], True)
    for odd in odds:
        _, problems = from_dict({"trainer": odd, "data": {"seed": 1}})
        assert len(problems) == 1
        assert problems[0].startswith("trainer: expected a section")
