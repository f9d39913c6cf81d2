"""`slipstream train --dry-run`, through the command line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slipstream.cli import main
from slipstream.config.load import load_config
from slipstream.loops.dry_run import looked_at
from slipstream.loops.memory_estimate import MemoryEstimate, PhaseBytes, estimate_memory
from slipstream.models.config import ModelConfig
from tests.loops.helpers import ACTOR, ROLLOUT, rl_only, tiny


def test_prints_everything_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*tiny(tmp_path / "run"), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "train_batch_size: 2" in out
    assert re.search(r"^an RL step +2 prompts x 2 responses = 4 samples$", out, re.MULTILINE)
    assert re.search(r"^at most, all responses at full length +[\d.]+ [MG]B$", out, re.MULTILINE)
    assert re.search(r"^SFT 1/1 +loss", out, re.MULTILINE)
    assert re.search(r"^RL 1/1 +reward", out, re.MULTILINE)
    assert list(tmp_path.iterdir()) == []


def test_it_stops_where_the_run_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = rl_only(tmp_path / "run", f"{ROLLOUT}.kv_cache_bytes=1000")
    said = []
    for more in ([], ["--dry-run"]):
        assert main([*line, *more]) == 2
        said.append(capsys.readouterr().err)
    assert said[0] == said[1]
    assert "kv_cache_bytes=1000 is too small" in said[1]


def test_a_step_whatever_the_settings_of_the_run(tmp_path: Path) -> None:
    """Schedules, warm-ups, mini-batches and filters of long runs."""
    line = rl_only(
        tmp_path / "run",
        "algorithm.adv_estimator=gae",
        "data.train_batch_size=8",
        f"{ACTOR}.ppo_mini_batch_size=4",
        f"{ACTOR}.optim.lr_scheduler_type=cosine",
        f"{ACTOR}.optim.min_lr_ratio=0.1",
        f"{ACTOR}.optim.lr_warmup_steps=10",
        "critic.ppo_mini_batch_size=2",
        "trainer.critic_warmup=3",
        "trainer.total_training_steps=100",
        "algorithm.filter_groups.enable=true",
        f"{ROLLOUT}.over_sample_rate=0.5",
    )
    assert main([*line, "--dry-run"]) == 0


def test_another_command_of_the_same_settings(tmp_path: Path) -> None:
    line = tiny(tmp_path / "run")
    assert main(["sft", *line[1:], "--dry-run"]) == 0
    assert main(["rl", *line[1:], "--dry-run"]) == 0
    assert list(tmp_path.iterdir()) == []


def estimated(*overrides: str) -> PhaseBytes:
    config = load_config(
        ["sft.total_training_steps=0", *overrides], recipe="tiny", notify=lambda _: None
    )
    policy, batches = looked_at(config, "rl")
    assert isinstance(policy, ModelConfig)
    return estimate_memory(config, "rl", policy, batches).phases["RL"]


def test_what_more_takes_more() -> None:
    plain = estimated()
    assert set(plain.held) == {
        "policy and optimizer",
        "engine's weights",
        "keys and values",
        "sampled tokens",
    }
    critic = estimated("algorithm.adv_estimator=gae")
    assert critic.held["critic and optimizer"] == pytest.approx(
        plain.held["policy and optimizer"], rel=0.05
    )
    reference = estimated(f"{ACTOR}.use_kl_loss=true")
    assert 3 * reference.held["reference"] == pytest.approx(
        plain.held["policy and optimizer"], rel=0.05
    )
    longer = estimated(f"{ROLLOUT}.n=8")
    assert longer.held["sampled tokens"] == 4 * plain.held["sampled tokens"]
    step = "an optimizer step"
    assert longer.one_at_a_time[step] > 1.5 * plain.one_at_a_time[step]


def test_the_total_is_of_the_largest_phase_and_one_thing_at_a_time() -> None:
    estimate = MemoryEstimate(
        base=1000,
        phases={
            "SFT": PhaseBytes(held={"a": 100}, one_at_a_time={"b": 7, "c": 20}),
            "RL": PhaseBytes(held={"a": 30, "d": 50}),
        },
    )
    assert estimate.total == 1120
