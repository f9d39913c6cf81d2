"""An engine that a user's module registers: selection by name, and rules on its capabilities."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.cli import main
from slipstream.config import engines
from tests.run.helpers import ROLLOUT, metrics_of, result_of, rl_only, write_reward

MODULE = """
from dataclasses import replace
from slipstream.build.engine import EngineSetup, make_hf
from slipstream.config.engines import HF
from slipstream.errors import ConfigError
from slipstream.inference import register_engine

made = []

def make(setup):
    engine = make_hf(setup)
    made.append(engine)
    return engine

def check(config, policy):
    if config.actor_rollout_ref.rollout.max_num_seqs == 3:
        raise ConfigError("actor_rollout_ref.rollout.max_num_seqs=3: mine needs another")

register_engine("mine", HF, make, check=check)
register_engine("liar", replace(HF, exact=True), make)
"""

Line = Callable[..., list[str]]


@pytest.fixture
def line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Line:
    """Returns a function that makes the arguments of an RL run with an engine of the module."""
    monkeypatch.setattr(engines, "_ENGINES", dict(engines._ENGINES))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "engine_of_mine", raising=False)
    (tmp_path / "engine_of_mine.py").write_text(MODULE)
    reward = write_reward(tmp_path)

    def of(name: str, *more: str, folder: str = "run") -> list[str]:
        module = "actor_rollout_ref.model.external_lib=engine_of_mine"
        settings = (f"{ROLLOUT}.name={name}", module, "trainer.total_training_steps=1")
        return rl_only(tmp_path / folder, *settings, *more, reward=reward)

    return of


def test_registered_engine_is_selected_by_name(line: Line, tmp_path: Path) -> None:
    assert main(line("mine")) == 0
    made = sys.modules["engine_of_mine"].made
    assert [type(engine).__name__ for engine in made] == ["HFEngine"]
    assert made[0].stats().version == 1
    assert main(line("hf", folder="hf")) == 0
    assert len(made) == 1
    assert metrics_of(tmp_path / "run")[1]["actor/grad_norm"] > 0
    assert result_of(tmp_path / "run") == result_of(tmp_path / "hf")
    # `slipstream eval` reads the run's settings and imports the module, too.
    assert main(["eval", "--checkpoint", str(tmp_path / "run"), "--problems", "2"]) == 0
    assert len(made) == 2


@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        (
            ["speculative.enable=true", "speculative.spec_strategy=history"],
            [f"{ROLLOUT}.name=mine does not support drafts; set {ROLLOUT}.name=embedded"],
        ),
        (
            ["algorithm.rollout_correction.support_replay=true", f"{ROLLOUT}.top_p=0.9"],
            [f"set {ROLLOUT}.name=embedded"],
        ),
        ([f"{ROLLOUT}.one_thread_below=4"], [f"set {ROLLOUT}.one_thread_below=0"]),
        ([f"{ROLLOUT}.max_num_seqs=3"], [f"{ROLLOUT}.max_num_seqs=3: mine needs another"]),
    ],
    ids=["drafts", "support replay", "one thread", "its own check"],
)
def test_capability_rules_apply_to_a_registered_engine(
    line: Line, overrides: list[str], messages: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line("mine", *overrides)) == 2
    error = capsys.readouterr().err
    for message in messages:
        assert message in error


def test_engine_name_that_the_module_does_not_register_is_refused(
    line: Line, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line("mime")) == 2
    error = capsys.readouterr().err
    assert f"{ROLLOUT}.name=mime is not known; did you mean mine?" in error


def test_engine_whose_capabilities_differ_from_its_registration_is_refused(
    line: Line, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line("liar")) == 2
    error = capsys.readouterr().err
    assert f"{ROLLOUT}.name=liar: the engine has" in error
    assert "exact=True" in error
