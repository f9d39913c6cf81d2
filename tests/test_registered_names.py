"""Every registry that takes a name also takes a member of an `Enum`, and stores its value."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, StrEnum
from typing import Any

import pytest

from slipstream.algorithms import registry as algorithms
from slipstream.compat import verl
from slipstream.compat.rewards import config_of
from slipstream.config import engines
from slipstream.data import registry as tasks
from slipstream.errors import ConfigError, name_of
from slipstream.metrics import loggers
from slipstream.rewards import functions, load


class Plain(Enum):
    MINE = "mine"


class OldText(str, Enum):  # noqa: UP042 (this is verl's kind of enum)
    MINE = "mine"


class Text(StrEnum):
    MINE = "mine"


class Other(Enum):
    HF = "hf"
    OPO = "opo"
    FILE = "file"
    TYPO = "mien"


class Number(Enum):
    MINE = 1


TABLES = (
    (algorithms, "_ADVANTAGES"),
    (algorithms, "_NEEDS"),
    (algorithms, "_POLICY_LOSSES"),
    (engines, "_ENGINES"),
    (tasks, "_TASKS"),
    (loggers, "LOGGERS"),
    (functions, "_BY_SOURCE"),
    (load, "_MANAGERS"),
)


@pytest.fixture(autouse=True)
def _restore_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, table in TABLES:
        monkeypatch.setattr(module, table, dict(getattr(module, table)))


def given(*_: Any, **__: Any) -> Any: ...


_EMBEDDED = engines.engine_entry("embedded").capabilities

REGISTRIES: dict[str, tuple[Callable[[Any], Any], Callable[[], Any]]] = {
    "advantage estimator": (
        lambda name: verl.register_adv_est(name)(given),
        lambda: algorithms.adv_estimator_names(),
    ),
    "policy loss": (
        lambda name: verl.register_policy_loss(name)(given),
        lambda: algorithms.policy_loss_names(),
    ),
    "engine": (
        lambda name: engines.register_engine(name, _EMBEDDED, given),
        lambda: engines.engine_names(),
    ),
    "task": (lambda name: tasks.register_task(name, given), lambda: tasks.task_names()),
    "logger": (lambda name: loggers.register_logger(name)(given), lambda: list(loggers.LOGGERS)),
    "reward": (lambda name: functions.register_reward(name, given), functions.data_sources),
    "reward manager": (
        lambda name: load.register_reward_manager(name, given),
        lambda: list(load._MANAGERS),
    ),
}


@pytest.mark.parametrize("kind", REGISTRIES)
@pytest.mark.parametrize("name", [Plain.MINE, OldText.MINE, Text.MINE, "mine"], ids=repr)
def test_a_registry_stores_the_value_of_an_enum_member(kind: str, name: Any) -> None:
    register, names = REGISTRIES[kind]
    before = set(names())
    register(name)
    (new,) = set(names()) - before
    assert new == "mine"
    assert type(new) is str


@pytest.mark.parametrize("kind", REGISTRIES)
@pytest.mark.parametrize(
    "name", [Number.MINE, 3, None, given], ids=["number", "int", "null", "function"]
)
def test_a_name_that_is_not_text_is_refused(kind: str, name: Any) -> None:
    register, names = REGISTRIES[kind]
    before = set(names())
    with pytest.raises(ValueError, match="must be text, or an Enum member whose value is text"):
        register(name)
    assert set(names()) == before


def test_look_ups_take_enum_members() -> None:
    verl.register_adv_est(Plain.MINE)(given)
    verl.register_policy_loss(Plain.MINE)(given)
    for name in (Plain.MINE, OldText.MINE, "mine"):
        assert verl.get_adv_estimator_fn(name) is given
        assert verl.get_policy_loss_fn(name) is given
    assert engines.engine_entry(Other.HF).name == "hf"
    with pytest.raises(ValueError, match="unknown policy loss 'mien'"):
        verl.get_policy_loss_fn(Other.TYPO)
    with pytest.raises(ConfigError, match="must be text"):
        name_of(Number.MINE, "task")


def test_enum_members_in_a_configuration_stand_for_their_values() -> None:
    for value in (Other.OPO, verl.AdvantageEstimator.OPO):
        config = config_of({"algorithm": {"adv_estimator": value}, "data": {"shuffle": False}})
        assert config.algorithm.adv_estimator == "opo"
    listed = config_of({"trainer": {"logger": [Other.FILE]}})
    assert tuple(listed.trainer.logger) == ("file",)
