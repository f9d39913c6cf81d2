"""Learned reward models: scores equal to transformers', rejected checkpoints, and whole runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForSequenceClassification

from slipstream.cli import main
from slipstream.data.tokenizer import build_tokenizer
from slipstream.errors import CheckpointError
from slipstream.rewards.batched import BatchRewardManager
from slipstream.rewards.data_proto import proto_of
from slipstream.training.compute_thread import ComputeThread
from slipstream.training.reward_model import RewardModel
from slipstream.types import Sample
from tests.data.helpers import CHATML, char_tokenizer, ids
from tests.rewards.helpers import sample
from tests.run.helpers import records_of, rl_only


def checkpoint(folder: Path, *, labels: int = 1, positions: int = 64, vocabulary: int = 224) -> Any:
    """Save a reward model with random weights in `folder`."""
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=positions,
            num_labels=labels,
            pad_token_id=None,
        )
    ).eval()
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def score_alone(model: Any, tokens: list[int]) -> float:
    """The checkpoint's score of one sequence without padding."""
    return float(model(input_ids=torch.tensor([tokens])).logits[0, 0])


def scores_of(model: RewardModel, samples: list[Sample]) -> list[Any]:
    return anyio.run(model, proto_of(samples, [s.response for s in samples]))


@pytest.mark.parametrize("batch_size", [1, 3])
def test_scores_equal_transformers_on_the_rollout_tokens(tmp_path: Path, batch_size: int) -> None:
    model = checkpoint(tmp_path)
    compute = ComputeThread()
    scorer = RewardModel(tmp_path, build_tokenizer(), compute, batch_size=batch_size)
    # Some sequences end with token 0, 1 or 2, so none of these may be the padding token.
    samples = [sample(*tokens) for tokens in ([5, 0], [7], [1, 2, 3, 1], [4, 4, 2], [0, 0])]
    expected = [score_alone(model, [9, 9, *s.response_ids]) for s in samples]
    assert scores_of(scorer, samples) == pytest.approx(expected, abs=1e-5)
    assert len(set(expected)) == 5
    compute.close()


def test_reward_models_own_tokenizer_renders_the_conversation(tmp_path: Path) -> None:
    model = checkpoint(tmp_path)
    char_tokenizer(CHATML.replace("assistant:{% endif", "{% endif")).save_pretrained(tmp_path)
    scorer = RewardModel(tmp_path, build_tokenizer(), ComputeThread())
    one = sample(1, 2)
    one.prompt, one.response = [{"role": "user", "content": "ab"}], "cd"
    two = sample(1, 2)
    two.prompt, two.response = "ab", "cd"
    expected = [score_alone(model, ids(t)) for t in ("<s>user:ab<e>\n<s>assistant:cd<e>\n", "abcd")]
    assert scores_of(scorer, [one, two]) == pytest.approx(expected, abs=1e-6)


def test_only_the_too_long_response_fails(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, positions=6)
    scorer = RewardModel(tmp_path, build_tokenizer(), ComputeThread())
    manager = BatchRewardManager(scorer, decode=str)
    short, long = anyio.run(manager.score_group, [sample(1, 2), sample(*range(5))])
    assert short.value == pytest.approx(score_alone(model, [9, 9, 1, 2]))
    assert (long.value, long.failure) == (
        0.0,
        "7 tokens are more than the reward model's maximum of 6",
    )


def test_rejects_checkpoints_that_are_no_reward_model(tmp_path: Path) -> None:
    def load(folder: Path, **options: Any) -> RewardModel:
        return RewardModel(folder, build_tokenizer(), ComputeThread(), **options)

    with pytest.raises(CheckpointError, match=r"cannot be loaded .*config\.json and model"):
        load(tmp_path / "absent")
    checkpoint(tmp_path / "two", labels=2)
    with pytest.raises(CheckpointError, match="has 2 labels"):
        load(tmp_path / "two")
    checkpoint(tmp_path / "small", vocabulary=50)
    with pytest.raises(CheckpointError, match=r"vocabulary of 50 tokens.*tokenizer files"):
        load(tmp_path / "small")
    checkpoint(tmp_path / "short", positions=8)
    with pytest.raises(CheckpointError, match=r"max_length=9 is more than the 8 positions"):
        load(tmp_path / "short", max_length=9)
    char_tokenizer(None).save_pretrained(tmp_path / "short")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja"):
        load(tmp_path / "short")
    checkpoint(tmp_path / "headless")
    weights = load_file(tmp_path / "headless" / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, tmp_path / "headless" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks the weights score\.weight"):
        load(tmp_path / "headless")
    from transformers import LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig.from_pretrained(tmp_path / "two")).save_pretrained(tmp_path / "lm")
    with pytest.raises(CheckpointError, match="is LlamaForCausalLM, not a model for sequence"):
        load(tmp_path / "lm")


def test_run_with_a_reward_model(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "judge")
    run = rl_only(
        tmp_path / "run",
        "reward_model.enable=true",
        f"reward_model.model.path={tmp_path / 'judge'}",
        "reward_model.terms.repetition=0.5",
    )
    assert main(run) == 0
    rows = [row for rows in records_of(tmp_path / "run" / "rollouts").values() for row in rows]
    assert len(rows) == 8
    for row in rows:
        given = score_alone(model, [*row["prompt_ids"], *row["response_ids"]])
        assert row["score"] <= given + 1e-5
        assert row["score"] >= given - 0.5 - 1e-5


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("reward_model.enable=true",), "set reward_model.model.path=FOLDER"),
        (("reward_model.reward_manager=model",), "set reward_model.enable=true and"),
        (
            (
                "reward_model.enable=true",
                "reward_model.model.path=x",
                "custom_reward_function.path=y",
            ),
            "both score responses",
        ),
        (
            (
                "reward_model.enable=true",
                "reward_model.model.path=x",
                "reward_model.reward_manager=prime",
            ),
            "set reward_model.reward_manager=naive",
        ),
    ],
)
def test_rejects_incompatible_settings(
    tmp_path: Path,
    overrides: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(rl_only(tmp_path / "run", *overrides)) == 2
    assert message in capsys.readouterr().err


def test_warns_about_a_reward_model_that_is_not_enabled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = rl_only(tmp_path / "run", "reward_model.model.path=x")
    assert main(["config", *line[1:]]) == 0
    assert "reward_model.model.path has no effect: reward_model.enable=false" in (
        capsys.readouterr().err
    )
