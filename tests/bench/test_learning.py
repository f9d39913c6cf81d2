"""RL with every algorithm: what is run, and what its metrics come to."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.learning import RUNS, LearningBench, command, not_learned, plot, row, table
from slipstream.algorithms import adv_estimator_names, policy_loss_names
from slipstream.config.load import CONFIG_FILE
from slipstream.errors import ConfigError


@pytest.fixture
def bench(tmp_path: Path) -> LearningBench:
    (tmp_path / CONFIG_FILE).write_text("", encoding="utf-8")
    return LearningBench(policy=tmp_path, steps=4)


def lines(first: float, last: float) -> list[dict[str, float]]:
    accuracy = "val-core/countdown/acc/mean@1"
    steps = [{"timing_s/step": 2.0, "critic/score/mean": r} for r in (0.1, 0.2, 0.3, 0.5)]
    steps[-1][accuracy] = last
    return [{accuracy: first, f"{accuracy}/ci_low": 0.0}, *steps]


def test_all_that_ship_are_run() -> None:
    everything = " ".join(setting for settings in RUNS.values() for setting in settings)
    # The first is what the quickstart's settings have, and the others are names of the same.
    same = {"grpo", "grpo_vectorized", "rloo_vectorized"}
    for name in set(adv_estimator_names()) - same:
        assert f"algorithm.adv_estimator={name}" in everything, name
    same = {"grpo", "ppo", "policy_gradient", "reinforce", "rollout_correction", "bypass_mode"}
    for name in set(policy_loss_names()) - same:
        assert f"policy_loss.loss_mode={name}" in everything, name


def test_a_run_is_one_line_from_the_policy(bench: LearningBench, tmp_path: Path) -> None:
    line = command(bench, "on_policy_distillation", tmp_path / "run")
    assert f"actor_rollout_ref.model.path={tmp_path}" in line
    assert f"actor_rollout_ref.ref.path={tmp_path}" in line
    assert "trainer.total_training_steps=4" in line


def test_what_its_metrics_come_to(bench: LearningBench, tmp_path: Path) -> None:
    rows = [row(bench, "grpo", lines(0.4, 0.6)), row(bench, "gae", lines(0.4, 0.4))]
    assert rows[0].values["gain"] == pytest.approx(0.2)
    assert (rows[0].values["reward_first"], rows[0].values["reward_last"]) == (0.1, 0.5)
    assert rows[0].seconds.median == 8.0
    assert not_learned(rows) == ["gae"]
    assert "0.600" in table(rows)
    # Two curves, not an empty sheet.
    assert plot(rows, tmp_path / "sub" / "curves.png").stat().st_size > 20_000


def test_unknown_names_and_folders_are_refused(bench: LearningBench, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--only grop is not known; did you mean grpo"):
        LearningBench(policy=bench.policy, only=("grop",))
    with pytest.raises(ConfigError, match="is no run folder"):
        LearningBench(policy=tmp_path / "nothing")
