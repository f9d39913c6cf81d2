"""Fixtures: a reference run, made once, and runs without plots."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.run.helpers import finish, result_of, start, write_reward
from tests.run.killing import line_of


@dataclass(frozen=True, slots=True)
class Whole:
    """An uninterrupted SFT and RL run in which every part with a state is used."""

    folder: Path
    reward: Path
    result: dict[str, Any]


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    root = tmp_path_factory.mktemp("whole")
    reward = write_reward(root)
    output = root / "output.txt"
    code = finish(start(line_of(root / "run", reward), output), output)
    assert code == 0, output.read_text(encoding="utf-8")
    return Whole(root / "run", reward, result_of(root / "run"))


@pytest.fixture(autouse=True)
def quick_picture(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Draw no plots, which takes longer than a tiny run, except in tests with `picture` in their
    name."""
    if "picture" not in request.node.name:
        monkeypatch.setattr("slipstream.run.train.plot_run", lambda logs, path: path)
