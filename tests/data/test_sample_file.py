"""Samples for RL are read back as they were written, and can be trained on."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.data.sample_file import load_samples, save_samples
from slipstream.data.trajectories import read_trajectory, to_sample
from slipstream.errors import DataError
from slipstream.rollout.functional import prepare_grpo_batch
from slipstream.training import policy_loss_fn
from slipstream.types import EpisodeRecord, PlacedReward, Sample
from tests.data.agent_records import with_tokens
from tests.training.helpers import gradients, relative_difference, tiny_backend, tiny_decoder
from tests.training.test_single import in_float64


def branched(group: int, index: int, reward: float) -> Sample:
    """Two branches: the second has a sampled token of the first in its prompt."""
    made = with_tokens(reward=reward, metadata={"agent": "one"})
    made["messages"][3]["prompt_token_ids"] = [1, 2, 3, 9 + index]
    return to_sample(read_trajectory(made), group_index=group, index=index)


def saved(folder: Path) -> Path:
    path = folder / "samples.jsonl"
    save_samples(path, [branched(0, 0, 1.0), branched(0, 1, 0.0)])
    return path


def test_samples_are_read_back_as_they_were(tmp_path: Path) -> None:
    samples = [branched(0, 0, 1.0), branched(1, 0, 0.25)]
    turns = EpisodeRecord(rewards=[PlacedReward(3, "tool", 0.5)])
    samples[0] = replace(samples[0], episode=turns)
    save_samples(tmp_path / "new" / "s.jsonl", samples)
    assert load_samples(tmp_path / "new" / "s.jsonl") == samples


def test_one_line_has_the_fields_of_a_sample(tmp_path: Path) -> None:
    line = json.loads(saved(tmp_path).read_text().splitlines()[0])
    (earlier,) = line.pop("earlier")
    assert (earlier["ids"], earlier["branch"], earlier["parent"]) == ([1, 2, 3, 4], 0, None)
    del line["messages"], line["metadata"]
    assert line == {
        "uid": "ana",
        "group": 0,
        "index": 0,
        "branch": 1,
        "parent": 0,
        "reward": 1.0,
        "status": "completed",
        "ids": [1, 2, 3, 9, 7],
        "loss_mask": [0.0, 0.0, 0.0, 0.0, 1.0],
        "log_probs": [0.0, 0.0, 0.0, 0.0, -0.125],
        "segments": [
            {"role": "prompt", "tokens": 4, "spans": []},
            {"role": "assistant", "tokens": 1, "spans": [[0, 1, 3]]},
        ],
        "turn_rewards": [],
    }


def test_a_grpo_step_has_gradients_of_sampled_tokens_only(tmp_path: Path) -> None:
    samples = load_samples(saved(tmp_path))
    batch = prepare_grpo_batch(samples, norm_adv_by_std_in_grpo=False)
    assert batch.rollout_log_probs is not None
    assert batch.rollout_log_probs.tolist()[:4] == [0.0, 0.0, -0.5, -0.25]
    decoder = tiny_decoder()
    # At the first step the ratio is 1, so the gradient of a token is -advantage * d log p.
    model = in_float64(decoder)
    losses = []
    for branch in (branch for sample in samples for branch in sample.branches):
        law = torch.log_softmax(model(torch.tensor(branch.tokens)[None]).logits[0], -1)
        sampled = {0: [2, 3], 1: [4]}[branch.branch]
        advantage = branch.reward - 0.5
        losses += [-advantage * law[place - 1, branch.tokens[place]] for place in sampled]
    assert len(losses) == 6
    torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    backend = tiny_backend(decoder)
    metrics = backend.forward_backward(batch, policy_loss_fn()).wait()
    found = gradients(backend)
    expected = {name: expected[name] for name in found}
    assert relative_difference(found, expected) < 1e-5
    assert sum(float(grad.abs().sum()) for grad in found.values()) > 0
    assert metrics["actor/pg_loss"] == pytest.approx(0.0, abs=1e-6)
    before = backend.get_weights().wait()
    backend.optim_step().wait()
    after = backend.get_weights().wait()
    assert any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"loss_mask": [0.0]}, ":1: ids, loss_mask and log_probs must have equal length, got 5, 1"),
        ({"loss_mask": [2, 0, 0, 0, 0]}, ":1: loss_mask has a number outside 0 to 1"),
        ({"log_probs": [0, 0, 0, 0, 1]}, ":1: a log-prob is 1.0, but the natural logarithm"),
        ({"ids": [0, 0, 0, 0, "1"]}, ":1: ids must be token ids of at least 0, got '1'"),
        ({"ids": [0, 0, 0, 1 << 40]}, ":1: ids must be token ids of at least 0, got 1099511627776"),
        ({"reward": None}, ":1: the reward must be a finite number, got None"),
        (
            {"segments": [{"role": "prompt", "tokens": 3, "spans": []}]},
            ":1: segments have 3 tokens",
        ),
        (
            {"segments": [{"role": "prompt", "tokens": 4, "spans": [[0, 5, 0]]}]},
            ":1: a span is outside its segment; convert again",
        ),
        ({"status": "odd"}, ":1: ValueError: 'odd' is not a valid Status; give a file of `slip"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    path = saved(tmp_path)
    first = json.loads(path.read_text().splitlines()[0])
    path.write_text(json.dumps({**first, **more}))
    with pytest.raises(DataError, match=re.escape(f"{path}{message}")):
        load_samples(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": []}))
    with pytest.raises(DataError, match="1: key 'segments' is missing; give a file of"):
        load_samples(path)
    path.write_text("\n")
    with pytest.raises(DataError, match="has no samples; give a file of `slipstream data traj"):
        load_samples(path)
    with pytest.raises(DataError, match="No such file or directory; give a file of"):
        load_samples(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="give another --output"):
        save_samples(path / "b.jsonl", [branched(0, 0, 1.0)])
