"""Whole runs with model families of the decoder: RoPE scaling, sliding windows, export."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slipstream.checkpoint.state import huggingface_folder
from slipstream.cli import main
from slipstream.data.tokenizer import build_tokenizer
from slipstream.models import Decoder, ModelConfig, load_checkpoint, save_checkpoint
from slipstream.models.rope_scaling import YarnScaling
from tests.models.helpers import load_theirs
from tests.run.helpers import metrics_of, rl_only, tiny, write_reward

MODEL = "actor_rollout_ref.model"
LONGEST = 48
"""Tokens of the longest sequence in the tiny recipe: 16 of the prompt, 32 of the response."""
YARN = YarnScaling(factor=8.0, original_max_position_embeddings=16)


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reward(tmp_path_factory.mktemp("reward"))


def save(folder: Path, window: int) -> Path:
    tokenizer = build_tokenizer()
    config = ModelConfig(
        family="mistral",
        vocab_size=-(-len(tokenizer) // 16) * 16,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        rope_scaling=YARN,
        sliding_window=window,
        windowed_layers=(0, 1),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    decoder = Decoder(config)
    decoder.init_weights(1)
    save_checkpoint(decoder, folder, save_tokenizer=tokenizer.save_pretrained)
    return folder


def test_mistral_with_yarn_scaling_trains_and_is_exported(reward: Path, tmp_path: Path) -> None:
    start = save(tmp_path / "start", 160)
    overrides = [
        f"{MODEL}.path={start}",
        f"{MODEL}.init=null",
        "sft.max_length=160",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "speculative.enable=true",
        "speculative.spec_strategy=history",
        "trainer.logger=[file]",
    ]
    assert main(tiny(tmp_path / "run", *overrides, reward=reward)) == 0
    metrics = metrics_of(tmp_path / "run")
    for step in (1, 2):
        assert metrics[step]["training/rollout_log_probs_differing"] == 0
    assert metrics[2]["actor/grad_norm"] > 0
    line = ["export", "--checkpoint", str(tmp_path / "run"), "--output", str(tmp_path / "out")]
    assert main(line) == 0
    trained = load_checkpoint(huggingface_folder(tmp_path / "run" / "global_step_2"))
    assert trained.config == load_checkpoint(start).config
    ids = torch.randint(0, 40, (2, 160), generator=torch.Generator().manual_seed(0))
    model = load_theirs(tmp_path / "out")
    with torch.no_grad():
        packed = trained.pack(torch.float32)
        positions = torch.arange(160).expand(2, -1)
        ours = packed.lm_head(packed.forward(ids, positions).final)
        torch.testing.assert_close(ours, model(input_ids=ids).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("phase", "overrides", "message"),
    [
        ("rl", [], "prompt and response may have 48 tokens, but the model has sliding_window=40"),
        ("sft", [], "SFT texts may have 256 tokens, but the model has sliding_window=40"),
        ("reference", [], "ref: prompt and response may have 48 tokens, but the model has slidi"),
    ],
)
def test_sliding_window_shorter_than_a_sequence_is_refused(
    phase: str,
    overrides: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    short = save(tmp_path / "ref", 40)
    if phase == "reference":
        start = save(tmp_path / "start", LONGEST)
        overrides = [
            f"actor_rollout_ref.ref.path={short}",
            "actor_rollout_ref.actor.use_kl_loss=true",
        ]
    else:
        start = short
    make = tiny if phase == "sft" else rl_only
    line = make(tmp_path / "run", f"{MODEL}.path={start}", f"{MODEL}.init=null", *overrides)
    assert main(line) == 2
    error = capsys.readouterr().err
    assert message in error
    remedy = error.rpartition("; set ")[2]
    assert "40" in remedy
    assert "implementation=transformers and actor_rollout_ref.rollout.name=hf" in remedy
