"""Tasks are registered and built by name."""

from __future__ import annotations

import pytest

from slipstream.data import registry
from slipstream.data.countdown import CountdownTask
from slipstream.data.registry import get_task, register_task, task_names
from slipstream.errors import ConfigError


def test_get_task_builds_with_options() -> None:
    task = get_task("countdown", 3, max_numbers=4)
    assert isinstance(task, CountdownTask)
    assert (task.seed, task.max_numbers) == (3, 4)


def test_unknown_names_suggest_similar_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown task 'countdwn'; did you mean countdown\?"):
        get_task("countdwn")
    with pytest.raises(ConfigError, match=r"no option 'giveup'; did you mean give_up\?"):
        get_task("countdown", giveup=0.1)
    with pytest.raises(ConfigError, match=r"no option 'zzz' \(known: give_up, holdout_fraction"):
        get_task("countdown", zzz=1)


def test_register_task_adds_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_TASKS", dict(registry._TASKS))
    register_task("mine", CountdownTask)
    assert task_names() == ["countdown", "lookup", "mine", "reasoning_gym"]
    with pytest.raises(ConfigError, match="'mine' already exists"):
        register_task("mine", CountdownTask)
