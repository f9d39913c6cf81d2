"""`slipstream.compat.slime` has slime's module layout."""

from __future__ import annotations

import importlib
import inspect

import pytest

# Import lines of custom generate functions for slime.
LINES = """
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample
"""


@pytest.mark.parametrize("line", LINES.split("\n")[1:-1])
def test_imports_of_slime_work_with_the_prefix_changed(line: str) -> None:
    _, module, _, name = line.split(" ")
    assert hasattr(importlib.import_module(f"slipstream.compat.{module}"), name)


def test_post_takes_slimes_arguments() -> None:
    post = importlib.import_module("slipstream.compat.slime.utils.http_utils").post
    assert [*inspect.signature(post).parameters][:3] == ["url", "payload", "max_retries"]
