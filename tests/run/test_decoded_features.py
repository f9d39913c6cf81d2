"""Features from the engine's decoding give the same head as those of the trainer, bit for bit."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.build import cotraining as build_cotraining
from slipstream.checkpoint.state import cotraining_file
from slipstream.checkpoint.tree import load_tree
from slipstream.cli import main
from slipstream.drafter.collector import RowCollector
from slipstream.drafter.decoded import DecodedFeatures
from slipstream.inference.engine.request import Running
from slipstream.inference.engine.scheduler import Scheduler
from slipstream.metrics.loggers import read_jsonl
from slipstream.types import Features, NoiseKey
from tests.run.helpers import assert_same_result, result_of, rl_only, write_reward
from tests.run.test_cotraining import LEARN, SETTINGS, TRAIN

DECODED = f"{TRAIN}.collect_hidden_states_from_engine=true"
ROLLOUT = "actor_rollout_ref.rollout"
# A small KV cache, so that few requests run at once, and prefix caching.
CROWDED = (f"{ROLLOUT}.kv_cache_bytes=60000", f"{ROLLOUT}.enable_prefix_caching=true")


def assert_same_tree(left: Any, right: Any, where: str = "state") -> None:
    assert type(left) is type(right), where
    if isinstance(left, dict):
        assert left.keys() == right.keys(), where
        for name, value in left.items():
            assert_same_tree(value, right[name], f"{where}.{name}")
    elif isinstance(left, list | tuple):
        assert len(left) == len(right), where
        for place, (one, other) in enumerate(zip(left, right, strict=True)):
            assert_same_tree(one, other, f"{where}.{place}")
    elif isinstance(left, torch.Tensor):
        assert torch.equal(left, right), where
    else:
        assert left == right, where


def differing(line: dict[str, Any]) -> dict[str, Any]:
    """The results of a run without the metric that differs between the two ways to collect."""
    return {
        name: {step: {k: v for k, v in m.items() if k != "drafter/decoded_samples"}
               for step, m in value.items()}
        if name == "rl metrics"
        else value
        for name, value in line.items()
    }  # fmt: skip


@pytest.fixture
def preempted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Preempt a request in every seventh step; returns the ids of preempted requests."""
    names: list[str] = []
    steps = itertools.count(1)
    make_room = Scheduler.make_room

    def crowded(self: Scheduler, weights: int) -> list[Running]:
        gone = make_room(self, weights)
        if next(steps) % 7 == 0 and len(self.running) > 1:
            gone.append(self.running[-1])
            names.append(gone[-1].request_id)
            self.preempt(gone[-1], weights)
        return gone

    monkeypatch.setattr(Scheduler, "make_room", crowded)
    return names


def test_buffer_and_head_equal_those_from_the_trainers_features(
    tmp_path: Path, preempted: list[str]
) -> None:
    reward = write_reward(tmp_path)
    for name, more in {"theirs": (), "ours": (*CROWDED, DECODED)}.items():
        line = rl_only(tmp_path / name, *SETTINGS, *LEARN, *more, reward=reward)
        assert main(line) == 0
    assert len(preempted) > 4
    for step in (2, 4):
        ours, theirs = (
            load_tree(cotraining_file(tmp_path / name / f"global_step_{step}"))
            for name in ("ours", "theirs")
        )
        assert len(theirs["collector"]["buffer"]["kept"]) > 3
        assert len(theirs["collector"]["held_out"]) > 3
        assert theirs["version"] + theirs["hold_backs"] == step // 2
        assert_same_tree(ours, theirs)
    assert_same_result(
        differing(result_of(tmp_path / "ours")), differing(result_of(tmp_path / "theirs"))
    )
    steps = dict(read_jsonl(tmp_path / "ours" / "metrics.jsonl"))
    # Two responses to each of six prompts; none is too short to train on.
    assert [steps[n]["drafter/decoded_samples"] for n in range(1, 5)] == [12] * 4


def test_decoded_features_stay_within_their_byte_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reward = write_reward(tmp_path)
    assert main(rl_only(tmp_path / "theirs", *SETTINGS, *LEARN, reward=reward)) == 0
    # Enough for about five responses.
    monkeypatch.setattr(build_cotraining, "DecodedFeatures", lambda nbytes: DecodedFeatures(40000))
    most = [0]
    receive = DecodedFeatures.receive

    def noted(self: DecodedFeatures, request: Any, generation: Any) -> None:
        receive(self, request, generation)
        most[0] = max(most[0], self.nbytes)

    monkeypatch.setattr(DecodedFeatures, "receive", noted)
    assert main(rl_only(tmp_path / "ours", *SETTINGS, *LEARN, DECODED, reward=reward)) == 0
    steps = dict(read_jsonl(tmp_path / "ours" / "metrics.jsonl"))
    assert all(0 < steps[n]["drafter/decoded_samples"] < 12 for n in range(1, 5))
    assert 20000 < most[0] <= 40000
    ours, theirs = (
        load_tree(cotraining_file(tmp_path / name / "global_step_4")) for name in ("ours", "theirs")
    )
    assert_same_tree(ours, theirs)


@pytest.mark.parametrize("mode", ["interval", "opportunistic"])
def test_decoded_features_equal_the_trainers_with_carry_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preempted: list[str], mode: str
) -> None:
    """Timing decides which responses are carried over, so every row is computed in both ways."""
    decoded: dict[Any, torch.Tensor] = {}
    compared: list[int] = []
    take, receive = DecodedFeatures.take, RowCollector.receive

    def noted(self: DecodedFeatures, key: NoiseKey | None, tokens: list[int]) -> None:
        found = take(self, key, tokens)
        if found is not None:
            decoded[key] = found

    def checked(self: RowCollector, features: Features) -> None:
        theirs = decoded.pop(features.key, None)
        if theirs is not None:
            assert torch.equal(theirs, features.hidden[:-1])
            compared.append(len(theirs))
        receive(self, features)

    monkeypatch.setattr(DecodedFeatures, "take", noted)
    monkeypatch.setattr(RowCollector, "receive", checked)
    line = rl_only(
        tmp_path / "run",
        *SETTINGS,
        *LEARN,
        *CROWDED,
        DECODED,
        f"{TRAIN}.mode={mode}",
        f"{ROLLOUT}.over_sample_rate=0.5",
        f"{ROLLOUT}.partial_rollout=true",
        reward=write_reward(tmp_path),
    )
    assert main(line) == 0
    steps = dict(read_jsonl(tmp_path / "run" / "metrics.jsonl"))
    assert sum(steps[n]["rollout/num_carried_over"] for n in range(1, 5)) > 0
    assert preempted
    assert decoded == {}
    # Surplus and carried groups have samples that ended in an earlier step. Their features come
    # from the trainer.
    assert 24 < len(compared) <= 48


def test_features_are_collected_only_in_steps_that_train_the_head(tmp_path: Path) -> None:
    rare = (f"{TRAIN}.training_interval_steps=3", f"{TRAIN}.lookback_steps=1")
    line = rl_only(
        tmp_path / "run", *SETTINGS, *LEARN, *rare, DECODED, reward=write_reward(tmp_path)
    )
    assert main(line) == 0
    steps = dict(read_jsonl(tmp_path / "run" / "metrics.jsonl"))
    assert [steps[n]["drafter/decoded_samples"] for n in range(1, 5)] == [0, 0, 12, 0]
