"""Keys, defaults and names in the guides for users of VERL, FastRL and TRL are correct."""

from __future__ import annotations

import re
from importlib import import_module
from types import ModuleType

import pytest

from slipstream.config.aliases import RENAMED
from slipstream.config.tree import options, show
from slipstream.config.verl_keys import ONLY_NEUTRAL, REFUSED_VALUES
from slipstream.main_ppo import VERL_DEFAULTS
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
    assert len(rows) == 10
    for key, default in rows:
        assert show(options()[key].default) == default, key


def test_keys_that_the_fastrl_guide_calls_refused_are_refused() -> None:
    table = read("from_fastrl.md").split("## What is refused")[1].split("## What is different")[0]
    keys = re.findall(r"^\| `([\w.]+)`", table, re.MULTILINE)
    assert len(keys) == 6
    known = {f"speculative.{key}" for key in REFUSED} | ONLY_NEUTRAL.keys() | REFUSED_VALUES.keys()
    assert set(keys) <= known


@pytest.mark.parametrize("name", ["from_trl.md", "getting_started.md", "concepts.md", "report.md"])
def test_keys_named_in_a_guide_exist(name: str) -> None:
    sections = "data|actor_rollout_ref|algorithm|reward_model|custom_reward_function|sft|critic"
    pattern = rf"`(?:\w+=\w+ )*((?:{sections}|trainer|speculative)\.[\w.]+)[=`]"
    named = set(re.findall(pattern, read(name))) - {"reward_model.ground_truth"}  # a column
    assert len(named) > 2
    assert [key for key in sorted(named) if key not in options()] == []


def verl_settings() -> tuple[str, str]:
    printed, also = re.findall(
        r"^\| key \| default .*\n\|---.*\n((?:\|.*\n)+)", read("from_verl.md"), re.MULTILINE
    )
    return printed, also


def test_verl_guide_states_the_current_defaults() -> None:
    printed, also = verl_settings()
    rows = {key: (ours, theirs) for key, ours, theirs in re.findall(
        r"^\| `([\w.]+)` \| (\w[^:|]*?)(?::.*?)? \| (\w[^:|]*?)(?::.*?)? \|$", printed + also, re.M
    )}  # fmt: skip
    assert printed.count("\n") == len(VERL_DEFAULTS)
    for key, theirs in VERL_DEFAULTS.items():
        assert rows[key][1] == show(theirs), key
    del rows["actor_rollout_ref.actor.ppo_mini_batch_size"]  # null: "the whole batch"
    assert len(rows) == 9
    for key, (ours, _) in rows.items():
        assert show(options()[key].default) == ours, key


def test_names_in_the_table_of_verl_modules_exist() -> None:
    missing, checked = [], 0
    table = read("from_verl.md").split("## Modules")[1]
    for first, second in re.findall(r"^\| (`[^|]*) \| ([^|]*) \|", table, re.MULTILINE):
        modules = [import_module(name) for name in compat_modules(first)]
        for name in re.findall(r"`(\w+)`", second):
            checked += 1
            if not any(hasattr(module, name) or has_module(module, name) for module in modules):
                missing.append(name)
    assert missing == []
    assert checked > 45


def compat_modules(cell: str) -> list[str]:
    """The modules of a cell; `.name` is next to the module before it."""
    names: list[str] = []
    for name in re.findall(r"`([\w.]+)`", cell):
        names.append(names[0].rpartition(".")[0] + name if name.startswith(".") else name)
    return [f"slipstream.compat.{name}" for name in names]


def has_module(package: ModuleType, name: str) -> bool:
    try:
        import_module(f"{package.__name__}.{name}")
    except ModuleNotFoundError:
        return False
    return True
