"""Runs that train a LoRA adapter, through the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.build.policy import make_reference
from slipstream.checkpoint.state import adapter_folder, huggingface_folder, optimizer_file
from slipstream.checkpoint.tree import load_tree
from slipstream.cli import main
from slipstream.models.hf_io import load_checkpoint
from slipstream.models.lora import merged_weights
from slipstream.models.lora_io import ADAPTER_CONFIG, load_adapter, read_adapter
from slipstream.training.lora import BaseWeights
from tests.run.helpers import (
    ACTOR,
    assert_same_result,
    metrics_of,
    policy,
    result_of,
    rl_only,
    tiny,
    without_validation,
    write_reward,
)

MODEL = "actor_rollout_ref.model"
LORA = (
    f"{MODEL}.lora_rank=4",
    f"{MODEL}.exclude_modules=[down_proj]",
    f"{ACTOR}.optim.lr=0.01",
    f"{ACTOR}.use_kl_loss=true",
    "trainer.save_freq=1",
    "trainer.total_training_steps=4",
)


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reward(tmp_path_factory.mktemp("reward"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, reward: Path) -> Path:
    """The folder of a run with an adapter in both SFT and RL."""
    folder = tmp_path_factory.mktemp("run") / "run"
    assert main(tiny(folder, *LORA, reward=reward)) == 0
    return folder


def test_rollout_and_trainer_log_probs_are_bitwise_equal(run: Path) -> None:
    metrics = metrics_of(run)
    assert sum(m.get("actor/grad_norm", 0.0) > 0 for m in metrics.values()) >= 3
    for step in range(1, 5):
        assert metrics[step]["training/rollout_log_probs_bitwise_equal"] == 1.0
        assert metrics[step]["training/rollout_probs_diff_max"] == 0.0
    # The base weights are the start of RL, so the KL is zero until the adapter is trained.
    assert metrics[1]["actor/kl_loss"] == 0.0
    assert metrics[4]["actor/kl_loss"] > 0.0


def test_checkpoint_contains_the_merged_model_and_the_adapter(run: Path) -> None:
    checkpoint = run / "global_step_4"
    base = load_checkpoint(huggingface_folder(run / "sft" / "global_step_2"))
    before = {name: p.detach().clone() for name, p in base.named_parameters()}
    config = load_adapter(base, adapter_folder(checkpoint))
    assert (config.rank, config.alpha, len(config.target_modules)) == (4, 16.0, 2 * 6)
    merged, saved = merged_weights(base), policy(run, 4)
    assert merged.keys() == saved.keys()
    for name, weight in merged.items():
        assert torch.equal(weight, saved[name]), name
        trained = "_proj" in name and "down_proj" not in name
        assert torch.equal(weight, before[name]) != trained, name
    state = load_tree(optimizer_file(checkpoint))
    assert all("lora_" in name for name in state["optimizer"]["adamw"])
    assert adapter_folder(run / "sft" / "global_step_2").is_dir()


def test_resumed_run_equals_uninterrupted_run(run: Path, reward: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert main(tiny(folder, *LORA, "trainer.total_training_steps=2", reward=reward)) == 0
    assert main(tiny(folder, *LORA, reward=reward)) == 0
    # Step 2 was the last one of the shorter run, which therefore validated after it.
    one, other = without_validation(result_of(folder), 2), without_validation(result_of(run), 2)
    assert_same_result(one, other)


def test_resume_refuses_a_run_whose_base_weights_are_missing(
    run: Path, reward: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "sft")
    line = tiny(tmp_path / "run", *LORA, "trainer.total_training_steps=5", reward=reward)
    assert main(line) != 0
    assert "has no checkpoint any more" in capsys.readouterr().err


def test_given_adapter_is_trained_further(
    run: Path, reward: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    references: list[Any] = []
    make = make_reference

    def observed(*arguments: Any, **more: Any) -> Any:
        references.append(make(*arguments, **more))
        return references[-1]

    monkeypatch.setattr("slipstream.build.team.make_reference", observed)
    adapter = adapter_folder(run / "global_step_4")
    line = rl_only(
        tmp_path / "run",
        f"{MODEL}.init=null",
        f"{MODEL}.path={huggingface_folder(run / 'sft' / 'global_step_2')}",
        # A run folder stands for its newest checkpoint, whose adapter is `adapter`.
        f"{MODEL}.lora_adapter_path={run}",
        f"{MODEL}.lora_alpha=16",
        f"{ACTOR}.use_kl_loss=true",
        f"{ACTOR}.optim.lr=0",
        "trainer.total_training_steps=1",
        reward=reward,
    )
    assert main(line) == 0
    (reference,) = references
    assert isinstance(reference, BaseWeights)
    metrics = metrics_of(tmp_path / "run")[1]
    assert metrics["training/rollout_log_probs_bitwise_equal"] == 1.0
    assert metrics["actor/kl_loss"] > 0.0
    trained, given = policy(tmp_path / "run", 1), policy(run, 4)
    for name, weight in trained.items():
        assert torch.equal(weight, given[name]), name
    base = json.loads((adapter / ADAPTER_CONFIG).read_text())["base_model_name_or_path"]
    assert base == str(huggingface_folder(run / "sft" / "global_step_2"))
    (config, tensors), (same, theirs) = (
        read_adapter(adapter_folder(tmp_path / "run" / "global_step_1")),
        read_adapter(adapter),
    )
    assert config == same
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in tensors.items())


def test_lora_alpha_must_equal_that_of_the_given_adapter(
    run: Path, reward: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = rl_only(
        tmp_path / "run",
        f"{MODEL}.init=null",
        f"{MODEL}.path={huggingface_folder(run / 'sft' / 'global_step_2')}",
        f"{MODEL}.lora_adapter_path={run}",
        f"{MODEL}.lora_alpha=32",
        reward=reward,
    )
    assert main(line) != 0
    assert f"lora_adapter_path={run} has 16; set {MODEL}.lora_alpha=16" in capsys.readouterr().err


def test_target_modules_without_a_match_list_the_layers(
    reward: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = rl_only(
        tmp_path / "run",
        f"{MODEL}.lora_rank=2",
        f"{MODEL}.target_modules=[qkv_proj]",
        reward=reward,
    )
    assert main(line) != 0
    error = capsys.readouterr().err
    assert f"{MODEL}.target_modules=qkv_proj matches no linear layer" in error
    assert "q_proj" in error
    assert "Traceback" not in error
