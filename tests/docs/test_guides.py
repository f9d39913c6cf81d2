"""Keys and defaults in the guides for users of FastRL and TRL are correct."""

from __future__ import annotations

import re

import pytest

from slipstream.config.aliases import RENAMED
from slipstream.config.tree import options, show
from slipstream.config.verl_keys import ONLY_NEUTRAL, REFUSED_VALUES
from tests.build.test_fastrl_keys import KEYS, REFUSED
from tests.docs.pages import DOCS


def read(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def test_fastrl_guide_lists_every_key() -> None:
    guide = read("from_fastrl.md")
    asked = {f"speculative.{key}" for key in KEYS.split()}
    assert [key for key in sorted(asked) if f"`{key}`" not in guide] == []


def test_fastrl_guide_maps_keys_to_existing_keys() -> None:
    keys = read("from_fastrl.md").split("## Keys")[1].split("## What is refused")[0]
    pairs = re.findall(r"^\| `([\w.]+)` \| `([\w.]+)` \|", keys, re.MULTILINE)
    assert len(pairs) > 20
    for old, new in pairs:
        assert new in options(), new
        assert old in options() or RENAMED[old] == new, old


def test_fastrl_guide_states_the_current_defaults() -> None:
    table = read("from_fastrl.md").split("## Defaults that differ")[1].split("## Keys")[0]
    rows = re.findall(r"^\| `([\w.]+)` \| `([\w.]+)` \|", table, re.MULTILINE)
    assert len(rows) == 8
    for key, default in rows:
        assert show(options()[key].default) == default, key


def test_keys_that_the_fastrl_guide_calls_refused_are_refused() -> None:
    table = read("from_fastrl.md").split("## What is refused")[1].split("## What is different")[0]
    keys = re.findall(r"^\| `([\w.]+)`", table, re.MULTILINE)
    assert len(keys) == 7
    known = {f"speculative.{key}" for key in REFUSED} | ONLY_NEUTRAL.keys() | REFUSED_VALUES.keys()
    assert set(keys) <= known


@pytest.mark.parametrize("name", ["from_trl.md", "getting_started.md", "concepts.md", "report.md"])
def test_keys_named_in_a_guide_exist(name: str) -> None:
    sections = "data|actor_rollout_ref|algorithm|reward_model|custom_reward_function|sft|critic"
    pattern = rf"`(?:\w+=\w+ )*((?:{sections}|trainer|speculative)\.[\w.]+)[=`]"
    named = set(re.findall(pattern, read(name))) - {"reward_model.ground_truth"}  # a column
    assert len(named) > 2
    assert [key for key in sorted(named) if key not in options()] == []
