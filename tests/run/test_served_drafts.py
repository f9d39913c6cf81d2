"""Co-training of a draft head whose drafts come from servers, with contract servers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from slipstream.cli import main
from slipstream.metrics.loggers import read_jsonl
from slipstream.models.draft.files import load_draft_head
from tests.docs.pages import ROOT
from tests.inference.servers.local import PROGRAM
from tests.run.helpers import ROLLOUT, rl_only, write_reward

TRAIN = "speculative.train"


@pytest.fixture
def line(tmp_path: Path) -> list[str]:
    """The arguments of a run of four steps that trains the head in every second one."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{PROGRAM}:{ROOT}" exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    return rl_only(
        tmp_path / "run",
        "trainer.total_training_steps=4",
        "trainer.save_freq=2",
        "data.train_batch_size=6",
        "data.val_size=2",
        "actor_rollout_ref.model.init.family=llama",
        f"{ROLLOUT}.name=vllm",
        f"{ROLLOUT}.server.python={python}",
        "speculative.enable=true",
        "speculative.eagle.tune_algorithm=PREDEFINED",
        "speculative.eagle.spec_steps=2",
        f"{TRAIN}.enable_drafter_training=true",
        f"{TRAIN}.training_interval_steps=2",
        f"{TRAIN}.updates_per_training=3",
        f"{TRAIN}.held_out_every=2",
        f"{TRAIN}.batch_size_per_gpu=4",
        reward=write_reward(tmp_path),
    )


def test_a_head_learns_beside_servers_and_drafts_in_them(
    tmp_path: Path, line: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert main(line) == 0
    steps = dict(read_jsonl(folder / "metrics.jsonl"))
    assert [steps[n]["drafter/updates"] for n in range(1, 5)] == [0, 3, 3, 6]
    versions = [steps[n]["drafter/version"] for n in range(1, 5)]
    assert versions[0] == 0
    assert versions[2] == 1
    # Before its first training the head does not draft.
    assert ["spec/accept_length" in steps[n] for n in range(1, 5)] == [False, False, True, True]
    for number in (3, 4):
        metrics = steps[number]
        assert 1 <= metrics["spec/accept_length"] <= 3
        assert metrics["spec/head_fraction"] == 1
        assert 1 <= metrics["spec/plan"] <= 2
        assert 0 <= metrics["spec/acceptance_rate_1"] <= 1
    load_draft_head(folder / "global_step_4" / "draft")
    output = "".join(capsys.readouterr())
    assert "no drafts before its first training" in output
    assert "does not draft until" not in output
    # A resumed run publishes the head of its checkpoint to the new servers, and drafts with it.
    assert main([*line, "trainer.total_training_steps=5"]) == 0
    steps = dict(read_jsonl(folder / "metrics.jsonl"))
    assert steps[5]["drafter/version"] == versions[3]
    assert steps[5]["spec/accept_length"] >= 1
