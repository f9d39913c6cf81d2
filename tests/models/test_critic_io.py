"""Critics as files: agreement with transformers, and error messages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.errors import CheckpointError
from slipstream.models import save_checkpoint
from slipstream.models.critic_io import load_critic, save_critic
from slipstream.models.value_model import ValueModel
from tests.models.helpers import FAMILIES, make_decoder, random_ids


def make_model(family: str = "qwen3") -> ValueModel:
    model = ValueModel.of(make_decoder(family))
    with torch.no_grad():
        model.score.weight.normal_(generator=torch.Generator().manual_seed(0))
        model.score.bias.fill_(0.5)
    return model


def values(model: ValueModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        positions = torch.arange(ids.shape[1]).expand(ids.shape)
        found: torch.Tensor = model.score(model.pack(torch.float32).forward(ids, positions).final)
        return found


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_and_we_read_each_others_critics(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForTokenClassification

    model, ids = make_model(family), random_ids(2, 32)
    save_critic(model, tmp_path / "ours")
    theirs, info = AutoModelForTokenClassification.from_pretrained(
        str(tmp_path / "ours"), dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values())
    assert (theirs.config.num_labels, theirs.score.out_features) == (1, 1)
    with torch.no_grad():
        logits = theirs.eval()(ids).logits[..., 0]
    torch.testing.assert_close(values(model, ids), logits, atol=1e-5, rtol=1e-5)
    theirs.save_pretrained(str(tmp_path / "theirs"))
    for folder in ("ours", "theirs"):
        assert torch.equal(values(load_critic(tmp_path / folder), ids), values(model, ids))


@pytest.mark.parametrize("tied", [True, False])
def test_a_language_model_loads_as_a_critic_with_zero_values(tied: bool, tmp_path: Path) -> None:
    policy = make_decoder("llama", tie_word_embeddings=tied)
    save_checkpoint(policy, tmp_path)
    model, expected = load_critic(tmp_path), ValueModel.of(policy)
    for (name, ours), (_, theirs) in zip(
        model.named_parameters(), expected.named_parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_critic(make_model(), tmp_path / "critic")
    return tmp_path / "critic"


def test_a_reward_model_loads_as_a_critic(saved: Path) -> None:
    config, weights = saved / "config.json", saved / "model.safetensors"
    raw, tensors = json.loads(config.read_text()), load_file(weights)
    config.write_text(json.dumps({**raw, "architectures": ["Qwen3ForSequenceClassification"]}))
    # Reward models of transformers have no bias.
    save_file({n: t for n, t in tensors.items() if n != "score.bias"}, weights)
    loaded = load_critic(saved)
    assert torch.equal(loaded.score.weight, tensors["score.weight"])
    assert loaded.score.bias.tolist() == [0.0]
    save_file({**tensors, "score.weight": torch.zeros(3, 64)}, weights)
    with pytest.raises(CheckpointError, match="has 3 labels"):
        load_critic(saved)


def test_other_models_raise_an_error(saved: Path) -> None:
    config, weights = saved / "config.json", saved / "model.safetensors"
    raw, tensors = json.loads(config.read_text()), load_file(weights)
    save_file({**tensors, "score.weight": torch.zeros(3, 64)}, weights)
    with pytest.raises(CheckpointError, match="has 3 labels"):
        load_critic(saved)
    save_file({n: t for n, t in tensors.items() if n != "score.bias"}, weights)
    with pytest.raises(CheckpointError, match=r"score\.bias is missing"):
        load_critic(saved)
    save_file({**tensors, "score.bias": torch.tensor([float("nan")])}, weights)
    with pytest.raises(CheckpointError, match=r"score\.bias has NaN"):
        load_critic(saved)
    config.write_text(json.dumps({**raw, "architectures": ["Qwen3ForQuestionAnswering"]}))
    with pytest.raises(CheckpointError, match="Qwen3ForQuestionAnswering is no critic"):
        load_critic(saved)
    with pytest.raises(CheckpointError, match="does not exist"):
        load_critic(saved / "nowhere")
