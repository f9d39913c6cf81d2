"""Draft heads in the layouts of vLLM and SGLang: loaders find all parameters, and round trips.

`SGLANG` and `VLLM` are the parameters of the engines' own classes on one device, in SGLang 0.5.23
(`LlamaForCausalLMEagle`, `Qwen2ForCausalLMEagle`) and vLLM 0.32 (`EagleLlamaForCausalLM`).
`loaded_by_engine` fills them as the engines' `load_weights` does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.cli import DRAFT_LAYOUTS
from slipstream.errors import CheckpointError, ConfigError
from slipstream.models.draft.eagle1 import DraftHead
from slipstream.models.draft.files import load_draft_head
from slipstream.models.draft.layouts import LAYOUTS, export_draft_head
from tests.models.helpers import config

D, F, Q, KV = 48, 80, 48, 16
"""Widths of the test models: model, MLP, queries, keys or values."""

VLLM: dict[str, tuple[int, ...]] = {
    "model.fc.weight": (D, 2 * D),
    "model.layers.0.self_attn.qkv_proj.weight": (Q + 2 * KV, D),
    "model.layers.0.self_attn.o_proj.weight": (D, Q),
    "model.layers.0.mlp.gate_up_proj.weight": (2 * F, D),
    "model.layers.0.mlp.down_proj.weight": (D, F),
    "model.layers.0.post_attention_layernorm.weight": (D,),
}
"""Without `model.embed_tokens` and `lm_head`, which the engine shares with the policy."""

SGLANG = {**VLLM, "model.fc.bias": (D,)}
SGLANG_QWEN2 = {**SGLANG, "model.layers.0.self_attn.qkv_proj.bias": (Q + 2 * KV,)}

ENGINES = {
    # Layout and family: class, parameters.
    ("vllm", "llama"): ("EagleLlamaForCausalLM", VLLM),
    ("sglang", "llama"): ("LlamaForCausalLMEagle", SGLANG),
    ("sglang", "qwen2"): ("Qwen2ForCausalLMEagle", SGLANG_QWEN2),
}

STACKED = (
    ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    ("gate_up_proj", ("gate_proj", "up_proj")),
)


def loaded_by_engine(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters that an engine's loader fills from the tensors of a folder."""
    found: dict[str, Tensor] = {}
    pieces: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        assert "lm_head" not in name
        name = f"model.{name}"
        for whole, parts in STACKED:
            for number, part in enumerate(parts):
                if part in name:
                    pieces.setdefault(name.replace(part, whole), {})[number] = tensor
                    break
            else:
                continue
            break
        else:
            found[name] = tensor
    for name, shards in pieces.items():
        assert sorted(shards) == list(range(len(shards)))
        found[name] = torch.cat([shards[number] for number in range(len(shards))])
    return found


def made(family: str) -> DraftHead:
    """Return a head without zeros and ones, for a policy with tied embeddings."""
    head = DraftHead(config(family, tie_word_embeddings=True))
    generator = torch.Generator().manual_seed(1)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    return head


@pytest.mark.parametrize(("layout", "family"), ENGINES)
def test_the_engines_class_finds_all_its_parameters(
    tmp_path: Path, layout: str, family: str
) -> None:
    architecture, parameters = ENGINES[layout, family]
    head = made(family)
    export_draft_head(head, tmp_path, layout)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["config.json", "model.safetensors"]
    found = loaded_by_engine(load_file(tmp_path / "model.safetensors"))
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == parameters
    own = head.state_dict()
    attention = [own[f"layers.0.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(found["model.layers.0.self_attn.qkv_proj.weight"], torch.cat(attention))
    assert torch.equal(found["model.fc.weight"], own["fc.weight"])
    if "model.fc.bias" in found:
        # Without it in the file, the class would leave the bias uninitialized.
        assert not found["model.fc.bias"].any()
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["architectures"] == [architecture]
    sizes = ("model_type", "num_hidden_layers", "hidden_size", "head_dim", "vocab_size")
    assert [raw[name] for name in sizes] == [family, 1, D, 8, 96]


def test_the_command_line_knows_all_layouts() -> None:
    assert set(DRAFT_LAYOUTS) == LAYOUTS.keys() == {layout for layout, _ in ENGINES}


def test_the_config_for_sglang_does_not_tie_embedding_and_lm_head(tmp_path: Path) -> None:
    """`set_embed_and_head` deletes both weights before it uses the policy's. With one module for
    both it would delete the same weight twice."""
    export_draft_head(made("llama"), tmp_path, "sglang")
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize(("layout", "family"), ENGINES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_survives_a_round_trip_in_each_layout_bit_for_bit(
    tmp_path: Path, layout: str, family: str, dtype: torch.dtype
) -> None:
    head = made(family).to(dtype).float()
    export_draft_head(head, tmp_path, layout, dtype=dtype)
    stored = load_file(tmp_path / "model.safetensors").values()
    assert {tensor.dtype for tensor in stored} == {dtype}
    back = load_draft_head(tmp_path, head.config)
    own, theirs = head.state_dict(), back.state_dict()
    assert own.keys() == theirs.keys()
    assert all(torch.equal(own[name], theirs[name]) for name in own)


@pytest.mark.parametrize("value", [0.5, float("nan")])
def test_a_bias_that_is_not_zero_raises_an_error(tmp_path: Path, value: float) -> None:
    head = made("llama")
    export_draft_head(head, tmp_path, "sglang")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["fc.bias"][3] = value
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor fc\.bias is not part of this model"):
        load_draft_head(tmp_path, head.config)


@pytest.mark.parametrize(
    ("layout", "family", "remedy"),
    [
        ("vllm", "qwen2", "export for sglang"),
        ("vllm", "qwen3", "serve it with Slipstream"),
        ("sglang", "qwen3", "actor_rollout_ref.model.init.family=llama"),
    ],
)
def test_a_family_without_a_class_in_the_engine_raises_an_error(
    tmp_path: Path, layout: str, family: str, remedy: str
) -> None:
    with pytest.raises(ConfigError, match=f"no class for EAGLE heads of the family {family}") as e:
        export_draft_head(made(family), tmp_path / "head", layout)
    assert remedy in str(e.value)
    assert not (tmp_path / "head").exists()
