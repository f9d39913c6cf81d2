"""Draft heads that a run cannot use, or that do not help: the messages and remedies."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.checkpoint.state import cotraining_file, draft_folder, huggingface_folder
from slipstream.cli import main
from slipstream.drafter.acceptance import Regression
from slipstream.drafter.trainer import DraftTrainer
from slipstream.metrics.loggers import read_jsonl
from tests.run.helpers import rl_only, write_reward
from tests.run.test_bad_input import refused

INIT, TRAIN = "actor_rollout_ref.model.init", "speculative.train"
LEARN = (
    "speculative.enable=true",
    f"{TRAIN}.enable_drafter_training=true",
    f"{TRAIN}.training_interval_steps=1",
    f"{TRAIN}.updates_per_training=1",
    f"{TRAIN}.held_out_every=2",
    "trainer.logger=[file]",
    "trainer.test_freq=1000",
    "data.val_size=1",
)


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reward(tmp_path_factory.mktemp("reward"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, reward: Path) -> Path:
    """The checkpoint of a run with co-training; tests damage copies of it."""
    folder = tmp_path_factory.mktemp("learned") / "run"
    assert main(rl_only(folder, *LEARN, reward=reward)) == 0
    return folder / "global_step_2"


def no_change(folder: Path) -> None:
    pass


def other_vocabulary(folder: Path) -> None:
    change_config(folder, vocab_size=999)


def eagle3(folder: Path) -> None:
    change_config(folder, architectures=["LlamaForCausalLMEagle3"])


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def of_three_layers(folder: Path) -> None:
    change_tensor(folder, lambda weight: torch.cat([weight, weight[:, :32]], dim=1))


def not_finite(folder: Path) -> None:
    change_tensor(folder, lambda weight: weight.index_fill(0, torch.tensor([3]), float("nan")))


def change_tensor(folder: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "fc.weight": change(tensors["fc.weight"])}, folder / "model.safetensors")


def cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("change", "policy", "parts"),
    [
        (no_change, [f"{INIT}.hidden_size=64"], ["hidden_size is 32 in the head and 64 in the"]),
        (no_change, [f"{INIT}.family=qwen2"], ["family is qwen3 in the head and qwen2 in the"]),
        (other_vocabulary, [], ["vocab_size is 999 in the head and 224 in the policy"]),
        (eagle3, [], ["no auxiliary layers", "2, 1 and -1 of 2, are not three layers in order"]),
        (
            of_three_layers,
            [],
            ["fc.weight has shape (32, 96), expected (32, 64)", "export it like this"],
        ),
        (not_finite, [], ["tensor fc.weight has NaN or infinite values", "all finite"]),
        (cut_short, [], ["corrupt or cut short", "put a complete draft head there"]),
    ],
)
def test_head_that_does_not_fit_the_policy_is_refused(
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[Path], None],
    policy: Sequence[str],
    parts: Sequence[str],
) -> None:
    head = tmp_path / "head"
    shutil.copytree(draft_folder(checkpoint), head)
    change(head)
    given = f"speculative.eagle.spec_model_path={head}"
    line = rl_only(tmp_path / "run", *LEARN, *policy, given)
    refused(line, 4, capsys, str(head), *parts, "`slipstream draft`")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_policy_folder_is_refused_as_draft_head(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = f"speculative.eagle.spec_model_path={huggingface_folder(checkpoint)}"
    line = rl_only(tmp_path / "run", *LEARN, given)
    refused(line, 4, capsys, "it has 2 layers", "`slipstream draft`")


@pytest.mark.parametrize("file", [cotraining_file, lambda c: draft_folder(c) / "model.safetensors"])
def test_resume_refuses_a_checkpoint_with_a_truncated_head(
    checkpoint: Path,
    reward: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    file: Callable[[Path], Path],
) -> None:
    run = tmp_path / "run"
    shutil.copytree(checkpoint.parent, run)
    path = file(run / checkpoint.name)
    path.write_bytes(path.read_bytes()[:-100])
    line = rl_only(run, *LEARN, "trainer.total_training_steps=3", reward=reward)
    name = path.relative_to(run / checkpoint.name)
    refused(line, 4, capsys, f"is corrupt: {name} has", "trainer.resume_mode=resume_path")


def test_resume_refuses_a_head_trained_with_another_optimizer(
    checkpoint: Path, reward: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = rl_only(
        tmp_path / "run",
        *LEARN,
        f"{TRAIN}.optim.optimizer=AdamW",
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={checkpoint}",
        reward=reward,
    )
    refused(
        line,
        4,
        capsys,
        "draft head: ",
        "optimizer is Muon, but this run's is AdamW; resume with the same",
    )


@pytest.mark.parametrize("name", ["training_interval_steps", "updates_per_training"])
def test_training_interval_and_updates_must_be_at_least_1(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = rl_only(tmp_path / "run", *LEARN, f"{TRAIN}.{name}=0")
    refused(
        line, 2, capsys, f"{TRAIN}.{name}: expected", "at least 1", f"for example {TRAIN}.{name}="
    )


def test_drafting_turns_off_with_one_message_when_the_head_becomes_useless(
    reward: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The head drafts until training spoils it. It is not held back, and the run continues."""
    train_on = DraftTrainer._train_on

    def spoil(self: DraftTrainer, *arguments: Any) -> Any:
        metrics = train_on(self, *arguments)
        if self.step > 10:
            with torch.no_grad():
                self.head.fc.weight.mul_(-1e3)
        return metrics

    monkeypatch.setattr(DraftTrainer, "_train_on", spoil)
    monkeypatch.setattr(Regression, "significant", False)
    more = (
        "trainer.total_training_steps=50",
        "trainer.save_freq=-1",
        "data.max_response_length=64",
        "speculative.eagle.spec_steps=2",
    )
    assert main(rl_only(tmp_path / "run", *LEARN, *more, reward=reward)) == 0
    assert capsys.readouterr().out.count("speculative decoding has turned itself off") == 1
    steps = dict(read_jsonl(tmp_path / "run" / "metrics.jsonl"))
    assert steps[10]["drafter/accept_length/after"] > 2
    assert steps[50]["drafter/accept_length/before"] < 1.2
    assert any(steps[n]["spec/on_fraction"] > 0 for n in range(2, 11))
    assert any(steps[n]["spec/recess_fraction"] == 1 for n in range(30, 51))
