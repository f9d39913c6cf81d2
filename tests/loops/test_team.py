"""Whole runs in several processes, through the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slipstream.cli import main
from tests.loops.helpers import (
    ACTOR,
    ROLLOUT,
    metrics_of,
    policy,
    records_of,
    rl_only,
    tiny,
    write_reward,
)

SHAPE = {
    "several updates, a reference": (f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.ppo_mini_batch_size=2"),
    "an adapter, weights that stay a step": (
        "actor_rollout_ref.model.lora_rank=4",
        f"{ACTOR}.optim.lr=1e-2",
        "trainer.sync_every=2",
    ),
    "KL over the whole vocabulary, cut-off sampling": (
        f"{ACTOR}.use_kl_loss=true",
        f"{ACTOR}.kl_loss_type=full",
        f"{ROLLOUT}.top_p=0.9",
    ),
    "a draft head that learns": (
        "speculative.enable=true",
        "speculative.spec_strategy=eagle",
        "speculative.train.enable_drafter_training=true",
        "speculative.train.training_interval_steps=1",
        "speculative.train.held_out_every=2",
    ),
}


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reward(tmp_path_factory.mktemp("reward"))


def texts(folder: Path) -> dict[str, list[str]]:
    return {name: [line["output"] for line in lines] for name, lines in records_of(folder).items()}


@pytest.mark.parametrize("shape", SHAPE)
def test_two_processes_write_what_one_does(tmp_path: Path, reward: Path, shape: str) -> None:
    for name, more in (("one", ()), ("two", ("trainer.nnodes=2", "trainer.num_threads=1"))):
        assert main(tiny(tmp_path / name, *SHAPE[shape], *more, reward=reward)) == 0
    one, two = tmp_path / "one", tmp_path / "two"
    assert texts(one / "rollouts")["1.jsonl"] == texts(two / "rollouts")["1.jsonl"]
    for phase in ("sft", "."):
        a, b = metrics_of(one / phase), metrics_of(two / phase)
        assert a.keys() == b.keys()
        assert a[1]["actor/grad_norm" if phase == "." else "sft/grad_norm"] == pytest.approx(
            b[1]["actor/grad_norm" if phase == "." else "sft/grad_norm"], rel=2e-2
        )
    left, right = policy(one, 2), policy(two, 2)
    assert left.keys() == right.keys()
    for name, weight in left.items():
        torch.testing.assert_close(right[name], weight, rtol=0, atol=2e-3)


def test_a_run_goes_on_in_another_number_of_processes(tmp_path: Path, reward: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main(rl_only(whole, "trainer.total_training_steps=3", reward=reward)) == 0
    for steps, nodes in ((1, 1), (2, 2), (3, 1)):
        more = f"trainer.total_training_steps={steps}", f"trainer.nnodes={nodes}"
        assert main(rl_only(parts, *more, reward=reward)) == 0
    assert sorted(texts(parts / "rollouts")) == ["1.jsonl", "2.jsonl", "3.jsonl"]
    for name in ("1.jsonl", "2.jsonl"):
        assert texts(parts / "rollouts")[name] == texts(whole / "rollouts")[name]
    left, right = policy(whole, 3), policy(parts, 3)
    for name, weight in left.items():
        torch.testing.assert_close(right[name], weight, rtol=0, atol=2e-3)


def test_a_cluster_that_does_not_answer_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert main(rl_only(tmp_path / "run", "trainer.nnodes=2")) == 2
    assert "RAY_ADDRESS=127.0.0.1:1: no Ray cluster answers there" in capsys.readouterr().err
