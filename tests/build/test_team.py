"""Whole runs in several processes, through the command line."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from slipstream.cli import main
from slipstream.report.ledger import ledger_of
from slipstream.report.read import read_run
from tests.run.helpers import (
    ACTOR,
    ROLLOUT,
    finish,
    metrics_of,
    policy,
    records_of,
    rl_only,
    start,
    steps_of,
    tiny,
    write_reward,
)
from tests.training.helpers import relative_difference

LEARNS = f"{ACTOR}.optim.lr=1e-2", "trainer.save_freq=1"

SHAPE = {
    "several updates, a reference": (f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.ppo_mini_batch_size=2"),
    "an adapter, weights that stay a step": (
        "actor_rollout_ref.model.lora_rank=4",
        "trainer.sync_every=2",
    ),
    "KL over the whole vocabulary, cut-off sampling": (
        f"{ACTOR}.use_kl_loss=true",
        f"{ACTOR}.kl_loss_type=full",
        f"{ROLLOUT}.top_p=0.9",
    ),
    "an adapter, KL over the whole vocabulary to the base": (
        "actor_rollout_ref.model.lora_rank=4",
        f"{ACTOR}.use_kl_loss=true",
        f"{ACTOR}.kl_loss_type=full",
        f"{ACTOR}.kl_loss_coef=1",
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


def apart(a: Path, b: Path, step: int) -> float:
    """The relative difference of the weight changes of two runs, from the first checkpoint of run
    `a` to `step`."""
    start, first, second = policy(a, 1), policy(a, step), policy(b, step)
    assert first.keys() == second.keys() == start.keys()
    went = {name: weight - start[name] for name, weight in first.items()}
    assert any(weight.any() for weight in went.values())
    return relative_difference({n: w - start[n] for n, w in second.items()}, went)


def texts(folder: Path) -> dict[str, list[str]]:
    return {name: [line["output"] for line in lines] for name, lines in records_of(folder).items()}


@pytest.mark.parametrize("shape", SHAPE)
def test_two_processes_give_the_results_of_one(tmp_path: Path, reward: Path, shape: str) -> None:
    for name, more in (("one", ()), ("two", ("trainer.nnodes=2", "trainer.num_threads=1"))):
        assert main(tiny(tmp_path / name, *LEARNS, *SHAPE[shape], *more, reward=reward)) == 0
    one, two = tmp_path / "one", tmp_path / "two"
    assert texts(one / "rollouts")["1.jsonl"] == texts(two / "rollouts")["1.jsonl"]
    for phase in ("sft", "."):
        a, b = metrics_of(one / phase), metrics_of(two / phase)
        assert a.keys() == b.keys()
        assert a[1]["actor/grad_norm" if phase == "." else "sft/grad_norm"] == pytest.approx(
            b[1]["actor/grad_norm" if phase == "." else "sft/grad_norm"], rel=2e-2
        )
    assert apart(one, two, 2) < 0.1
    for name in ("actor/kl_loss", "actor/entropy", "actor/pg_loss"):
        (ours, theirs) = (metrics_of(each)[2].get(name) for each in (one, two))
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            small = 1e-6 if name == "actor/kl_loss" else 1e-4
            assert theirs == pytest.approx(ours, rel=0.1, abs=small)
            assert name != "actor/kl_loss" or ours > 10 * small
    # Start and end of the other processes are accounted for, too.
    ledger = ledger_of(read_run(two))
    assert ledger is not None
    assert ledger.parts["end of other processes"] > 0
    assert ledger.unexplained < 0.08


def test_run_resumes_with_another_number_of_processes(tmp_path: Path, reward: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main(rl_only(whole, *LEARNS, "trainer.total_training_steps=3", reward=reward)) == 0
    for steps, nodes in ((1, 1), (2, 2), (3, 1)):
        more = f"trainer.total_training_steps={steps}", f"trainer.nnodes={nodes}"
        assert main(rl_only(parts, *LEARNS, *more, reward=reward)) == 0
    assert sorted(texts(parts / "rollouts")) == ["1.jsonl", "2.jsonl", "3.jsonl"]
    for name in ("1.jsonl", "2.jsonl"):
        assert texts(parts / "rollouts")[name] == texts(whole / "rollouts")[name]
    assert apart(whole, parts, 3) < 0.1


def test_unreachable_ray_cluster_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert main(rl_only(tmp_path / "run", "trainer.nnodes=2")) == 2
    assert "RAY_ADDRESS=127.0.0.1:1: no Ray cluster answers there" in capsys.readouterr().err


def test_sigterm_ends_a_run_with_a_checkpoint(tmp_path: Path, reward: Path) -> None:
    """Ray installs a signal handler that would end the process at once."""
    run, output = tmp_path / "run", tmp_path / "output.txt"
    more = "trainer.nnodes=2", "trainer.total_training_steps=1000", "trainer.save_freq=-1"
    process = start(rl_only(run, *more, reward=reward), output)
    log = run / "metrics.jsonl"
    assert process.pid is not None
    while process.is_alive() and (not log.exists() or not log.read_text()):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGTERM)
    assert finish(process, output) == 130, output.read_text()
    assert steps_of(run)
    assert "Traceback" not in output.read_text()
