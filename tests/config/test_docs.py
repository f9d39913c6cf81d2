"""Tests of the generated page of options, and of `slipstream config KEY`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from slipstream.config.docs import describe, render_markdown
from slipstream.config.schema import Config
from slipstream.config.schema_actor import ModelInitSection
from slipstream.config.sources import override_assignments, parse_overrides
from slipstream.config.tree import example, from_dict, options, to_dict
from slipstream.errors import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "config.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == render_markdown(), (
        "python -m slipstream.config.docs docs/config.md"
    )


def test_the_page_has_every_option() -> None:
    rows = [line for line in render_markdown().splitlines() if line.startswith("| `")]
    assert len(rows) == sum(option.section is None for option in options().values())


def test_describe_shows_meaning_type_default_and_example() -> None:
    assert describe("actor_rollout_ref.rollout.n") == (
        "actor_rollout_ref.rollout.n\n"
        "  Responses per prompt: the group size.\n"
        "  type: an integer, at least 1\n"
        "  default: 8\n"
        "  example: actor_rollout_ref.rollout.n=8"
    )


def test_describe_lists_the_keys_of_a_section() -> None:
    lines = describe("algorithm").splitlines()
    assert lines[1] == "  From rewards to advantages."
    assert "  algorithm.kl_ctrl.kl_coef = 0.001" in lines


def test_an_unknown_key_is_an_error_with_similar_keys() -> None:
    with pytest.raises(ConfigError, match=r"did you mean trainer\.seed or data\.seed"):
        describe("trainer.sed")


def test_every_example_has_the_type_of_its_option() -> None:
    leaves = [option for option in options().values() if option.section is None]
    examples = {option.key: example(option) for option in leaves}
    assert examples["data.val_files"] == "data.val_files=[name]"
    assert examples["reward_model.reward_kwargs"] == "reward_model.reward_kwargs='{}'"
    arguments = [argument for text in examples.values() for argument in shlex.split(text)]
    assert len(arguments) == len(examples)
    tree = to_dict(Config())
    tree["actor_rollout_ref"]["model"]["init"] = to_dict(ModelInitSection())
    for assignment in override_assignments(parse_overrides(arguments)):
        if "$" not in str(assignment.value):
            node: Any = tree
            *path, name = assignment.key.split(".")
            for part in path:
                node = node[part]
            node[name] = assignment.value
    assert from_dict(tree)[1] == []
