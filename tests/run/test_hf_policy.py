"""Whole runs with HF policies: SFT, RL, resume, eval, export, refused settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.checkpoint.state import huggingface_folder
from slipstream.cli import main
from slipstream.data.tokenizer import build_tokenizer
from slipstream.metrics.names import check_names
from tests.models.helpers import load_theirs
from tests.models.hf_policies import save_hf_policy
from tests.run.helpers import (
    ACTOR,
    ROLLOUT,
    assert_same_result,
    metrics_of,
    policy,
    records_of,
    result_of,
    rl_only,
    steps_of,
    tiny,
    write_reward,
)
from tests.run.test_model_families import save

MODEL = "actor_rollout_ref.model"
QUIET = (
    "trainer.logger=[file]",
    "trainer.test_freq=1000",
    "trainer.val_before_train=false",
    "data.val_size=2",
    "data.max_response_length=20",
)


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reward(tmp_path_factory.mktemp("reward"))


def checkpoint(folder: Path, kind: str = "gpt2") -> Path:
    """Save an HF policy with the vocabulary of the task."""
    tokenizer = build_tokenizer()
    more = {"n_positions": 256} if kind == "gpt2" else {}
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    save_hf_policy(kind, folder, vocab_size=len(tokenizer), **ids, **more)
    tokenizer.save_pretrained(str(folder))
    return folder


def of(model: Path, *overrides: str, rollout: str = "hf") -> list[str]:
    return [
        f"{MODEL}.path={model}",
        f"{MODEL}.init=null",
        f"{ROLLOUT}.name={rollout}",
        *QUIET,
        *overrides,
    ]


STATEFUL = (
    "sft.save_freq=1",
    "trainer.save_freq=1",
    # The engines of a run resumed at step 3 have the weights of step 2.
    "trainer.sync_every=2",
    f"{ACTOR}.use_kl_loss=true",
    f"{ACTOR}.optim.lr=0.01",
)


@pytest.mark.parametrize("kind", ["gpt2", "mixtral"])
def test_resumed_run_equals_uninterrupted_run(kind: str, reward: Path, tmp_path: Path) -> None:
    start = checkpoint(tmp_path / "start", kind)

    def run(name: str, *overrides: str) -> dict[str, Any]:
        line = tiny(tmp_path / name, *of(start, *STATEFUL), *overrides, reward=reward)
        assert main(line) == 0
        result = result_of(tmp_path / name)
        # Runs validate at their end, and the partial runs end earlier.
        del result["validation"]
        for phase in ("sft metrics", "rl metrics"):
            for metrics in result[phase].values():
                for key in [key for key in metrics if key.startswith("val-")]:
                    del metrics[key]
        return result

    whole = run("whole", "trainer.total_training_steps=3")
    run("parts", "trainer.total_training_steps=2")
    assert_same_result(run("parts", "trainer.total_training_steps=3"), whole)
    path = f"trainer.resume_from_path={tmp_path}/whole/sft/global_step_1"
    steps = "trainer.total_training_steps=3"
    again = run("again", steps, "trainer.resume_mode=resume_path", path)
    assert sorted(again["sft metrics"]) == [2]
    for name, value in whole.items():
        if name.split("/")[0] in ("sft actor", "rl actor", "rollouts"):
            assert again[name] == value
    for step in (1, 2, 3):
        metrics = whole["rl metrics"][step]
        check_names(metrics)
    # From step 2 on, the engine has older weights than the trainer.
    assert whole["rl metrics"][1]["training/rollout_probs_diff_max"] < 1e-4
    assert whole["rl metrics"][3]["actor/kl_loss"] > 0
    first, last = policy(tmp_path / "whole", 1), policy(tmp_path / "whole", 3)
    assert not all(torch.equal(first[name], last[name]) for name in first)


def test_recorded_log_probs_equal_those_of_transformers(reward: Path, tmp_path: Path) -> None:
    start = checkpoint(tmp_path / "start")
    line = rl_only(tmp_path / "run", *of(start), "trainer.total_training_steps=1", reward=reward)
    assert main(line) == 0
    model = load_theirs(start)
    for record in records_of(tmp_path / "run" / "rollouts")["1.jsonl"]:
        prompt, response = record["prompt_ids"], record["response_ids"]
        with torch.no_grad():
            law = model(input_ids=torch.tensor([prompt + response])).logits[0].log_softmax(-1)
        rows = law[len(prompt) - 1 : -1]
        expected = rows.gather(1, torch.tensor(response)[:, None])[:, 0].tolist()
        assert record["log_probs"] == pytest.approx(expected, abs=1e-4)
    assert metrics_of(tmp_path / "run")[1]["training/rollout_probs_diff_max"] < 1e-4


SETTINGS = {
    "KL over the vocabulary": (f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type=full"),
    "sums of squared probabilities": ("algorithm.adv_estimator=optimal_token_baseline",),
    "entropy": (f"{ACTOR}.entropy_coeff=0.01", f"{ACTOR}.ppo_epochs=2"),
    "rows": (
        f"{ACTOR}.use_dynamic_bsz=false",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",
        f"{ACTOR}.log_prob_chunk_tokens=8",
    ),
    "activations again": (f"{MODEL}.enable_gradient_checkpointing=true",),
    "bf16": (f"{ACTOR}.dtype=bfloat16",),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_algorithm_settings_train_an_hf_policy(reward: Path, tmp_path: Path, name: str) -> None:
    start = checkpoint(tmp_path / "start")
    line = rl_only(tmp_path / "run", *of(start, *SETTINGS[name]), reward=reward)
    assert main(line) == 0
    by_step = metrics_of(tmp_path / "run")
    metrics = by_step[2]
    check_names(metrics)
    # The gradient is zero in a step whose rewards are all equal.
    assert by_step[1]["actor/grad_norm"] + metrics["actor/grad_norm"] > 0
    if name == "KL over the vocabulary":
        assert metrics["actor/kl_loss"] > 0
    written = policy(tmp_path / "run", 2)
    assert {tensor.dtype for tensor in written.values()} == {torch.float32}


def test_eval_and_export_accept_an_hf_policy(
    reward: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = checkpoint(tmp_path / "start", "gemma2")
    run = tmp_path / "run"
    assert main(rl_only(run, *of(start), reward=reward)) == 0
    assert "transformers computes the policy (gemma2)" in capsys.readouterr().out
    assert main(["eval", "--checkpoint", str(run), "--problems", "2"]) == 0
    out = tmp_path / "out"
    line = ["export", "--checkpoint", str(run), "--output", str(out), "--dtype", "bfloat16"]
    assert main(line) == 0
    assert f"model  {out} (gemma2, bfloat16, from" in capsys.readouterr().out
    model, trained = load_theirs(out), load_theirs(huggingface_folder(run / "global_step_2"))
    exported = dict(model.named_parameters())
    for name, parameter in trained.named_parameters():
        assert torch.equal(exported[name], parameter.to(torch.bfloat16).float())
    assert (out / "tokenizer.json").exists()


def test_reference_may_have_another_architecture(reward: Path, tmp_path: Path) -> None:
    """The policy itself runs in the embedded engine, with Slipstream's decoder."""
    other = checkpoint(tmp_path / "other")
    line = rl_only(
        tmp_path / "run",
        f"actor_rollout_ref.ref.path={other}",
        f"{ACTOR}.use_kl_loss=true",
        *QUIET,
        reward=reward,
    )
    assert main(line) == 0
    metrics = metrics_of(tmp_path / "run")[2]
    assert metrics["actor/kl_loss"] > 0
    assert metrics["training/rollout_log_probs_differing"] == 0


@pytest.mark.parametrize("key", ["sliding_window", "attention_bias"])
def test_hf_policy_trains_architectures_that_the_decoder_lacks(
    key: str, reward: Path, tmp_path: Path
) -> None:
    """A Mistral whose sliding window is shorter than its sequences, and a Llama with biases."""
    start = tmp_path / "start"
    _ = save(start, 24) if key == "sliding_window" else checkpoint(start, "llama")
    wanted = getattr(load_theirs(start).config, key)
    assert wanted in (24, True)
    line = tiny(tmp_path / "run", *of(start), f"{MODEL}.implementation=transformers", reward=reward)
    assert main(line) == 0
    assert steps_of(tmp_path / "run") == [2]
    assert metrics_of(tmp_path / "run")[2]["training/rollout_probs_diff_max"] < 1e-3
    out = tmp_path / "out"
    assert main(["export", "--checkpoint", str(tmp_path / "run"), "--output", str(out)]) == 0
    assert getattr(load_theirs(out).config, key) == wanted


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ([f"{ROLLOUT}.name=embedded"], ["name=embedded does not generate", f"{ROLLOUT}.name=hf"]),
        ([f"{MODEL}.lora_rank=4"], ["lora_rank=4 adapts the decoder; set", "lora_rank=0"]),
        ([f"{ACTOR}.optim.optimizer=Muon"], ["actor.optim.optimizer=Muon", "optimizer=AdamW"]),
        (["sft.optim.optimizer=Muon"], ["sft.optim.optimizer=Muon", "optimizer=AdamW"]),
        (["algorithm.adv_estimator=gae"], ["gae: a critic starts from", "critic.model.path"]),
        (
            ["speculative.enable=true", "speculative.spec_strategy=history"],
            ["does not support drafts", "speculative.enable=false"],
        ),
        (["data.max_response_length=300"], ["but the model has max_position_embeddings=256"]),
        (
            [f"{MODEL}.implementation=slipstream"],
            ["model_type 'gpt2' is not one that Slipstream's decoder", f"{ROLLOUT}.name=hf"],
        ),
    ],
)
def test_unsupported_settings_are_refused_for_hf_policies(
    overrides: Sequence[str],
    parts: Sequence[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    start = checkpoint(tmp_path / "start")
    make = tiny if "sft.optim.optimizer=Muon" in overrides else rl_only
    assert main(make(tmp_path / "run", *of(start, *overrides))) in (2, 4)
    error = capsys.readouterr().err
    assert "Traceback" not in error
    for part in parts:
        assert part in error
