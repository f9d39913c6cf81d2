"""Interactions written for VERL run unchanged, but for their imports."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from slipstream.environment.adapters.verl_interactions import (
    BaseInteraction,
    InteractionEnvironment,
    load_interactions,
)
from slipstream.environment.protocol import Answer, AssistantMessage, Turn
from slipstream.errors import ConfigError, DataError
from slipstream.types import Prompt

CODE = """
from slipstream.compat.verl.interactions.base import BaseInteraction

LOG = []

class TeacherInteraction(BaseInteraction):
    def __init__(self, config: dict):
        super().__init__(config)
        self._instances = {}

    async def start_interaction(self, instance_id=None, ground_truth=None, **kwargs):
        self._instances[instance_id] = ground_truth
        LOG.append("start")
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        said = [m["content"] for m in messages if m["role"] == "assistant"][-1]
        if said == self._instances[instance_id]:
            return True, "right", 1.0, {}
        return False, f"{said} is wrong", None, {"wrong": 1}

    async def finalize_interaction(self, instance_id, **kwargs):
        LOG.append("end")
        del self._instances[instance_id]
"""
FILE = "interaction: [{class_name: verl_style_users.TeacherInteraction, config: {}}]"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "verl_style_users.py").write_text(CODE)
    (tmp_path / "users.yaml").write_text(FILE)
    monkeypatch.delitem(sys.modules, "verl_style_users", raising=False)
    return tmp_path


def row(**kwargs: Any) -> Prompt:
    return Prompt(uid="q", ids=[1], extra_info={"interaction_kwargs": kwargs})


def turn(text: str) -> Turn:
    message = AssistantMessage(text=text, content=text)
    return Turn(message=message, number=1, messages=[message.as_message()])


def test_an_interaction_answers_until_it_ends_the_episode(folder: Path) -> None:
    interactions = load_interactions(folder / "users.yaml")
    assert list(interactions) == ["teacher"]

    async def work() -> list[Answer]:
        environment = InteractionEnvironment(interactions)
        await environment.reset(row(name="teacher", ground_truth="4"), 0)
        answers = [await environment.step(turn(text)) for text in ("3", "4")]
        assert await environment.score() == {}
        await environment.close()
        return answers

    first, last = anyio.run(work)
    assert list(first.messages) == [{"role": "user", "content": "3 is wrong"}]
    assert (first.done, first.rewards, first.metrics) == (False, {}, {"wrong": 1.0})
    assert (last.done, last.rewards) == (True, {"interaction": 1.0})
    assert sys.modules["verl_style_users"].LOG == ["start", "end"]


@pytest.mark.parametrize("kwargs", [{}, {"name": "techer"}])
def test_a_row_must_name_an_interaction(folder: Path, kwargs: dict[str, str]) -> None:
    environment = InteractionEnvironment(load_interactions(folder / "users.yaml"))
    with pytest.raises(DataError, match=r"row q: .*known: teacher"):
        anyio.run(environment.reset, row(**kwargs), 0)
    anyio.run(environment.close)


def test_two_interactions_of_one_name_are_refused(folder: Path) -> None:
    path = folder / "two.yaml"
    entry = "{name: a, class_name: verl_style_users.TeacherInteraction}"
    path.write_text(f"interaction: [{entry}, {entry}]")
    with pytest.raises(ConfigError, match="'a'"):
        load_interactions(path)


def test_a_file_without_interactions_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "none.yaml"
    path.write_text("tools: []")
    with pytest.raises(ConfigError, match="interaction_config_path"):
        load_interactions(path)


def test_an_interaction_changes_only_a_copy_of_the_conversation() -> None:
    class Spoils(BaseInteraction):
        async def generate_response(self, instance_id: str, messages: Any, **_: Any) -> Any:
            messages[0]["content"].append("more")
            return False, "", None, {}

    async def work() -> None:
        environment = InteractionEnvironment({"a": Spoils({})})
        await environment.reset(row(name="a"), 0)
        messages = [{"role": "user", "content": ["text"]}]
        message = AssistantMessage(text="")
        await environment.step(Turn(message=message, number=1, messages=messages))
        assert messages == [{"role": "user", "content": ["text"]}]

    anyio.run(work)
