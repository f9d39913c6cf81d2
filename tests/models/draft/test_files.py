"""Draft heads as folders: round trips, the published layout, and error messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.errors import CheckpointError
from slipstream.models.draft.eagle1 import DraftHead
from slipstream.models.draft.eagle3 import Eagle3Head
from slipstream.models.draft.files import load_draft_head, save_draft_head
from slipstream.models.draft.layouts import LAYOUTS, export_draft_head
from slipstream.models.rope_scaling import YarnScaling
from tests.models.helpers import FAMILIES, config

WEIGHTS = "model.safetensors"


def saved(folder: Path, family: str = "qwen3") -> DraftHead:
    head = DraftHead(config(family))
    head.init_weights(5)
    save_draft_head(head, folder)
    return head


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_survives_a_round_trip_bit_for_bit(tmp_path: Path, family: str) -> None:
    head = saved(tmp_path, family)
    loaded = load_draft_head(tmp_path, config(family)).state_dict()
    assert loaded.keys() == head.state_dict().keys()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in head.state_dict().items())


@pytest.mark.parametrize(
    ("family", "architecture"),
    [
        ("llama", "EagleLlamaForCausalLM"),
        ("qwen2", "Qwen2ForCausalLMEagle"),
        ("qwen3", "Qwen3ForCausalLMEagle"),
        ("mistral", "MistralForCausalLMEagle"),
    ],
)
def test_the_folder_has_the_layout_of_published_heads(
    tmp_path: Path, family: str, architecture: str
) -> None:
    saved(tmp_path, family)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["architectures"] == [architecture]
    assert (raw["model_type"], raw["num_hidden_layers"], raw["vocab_size"]) == (family, 1, 96)
    tensors = load_file(tmp_path / WEIGHTS)
    assert tensors["fc.weight"].shape == (48, 96)
    assert "layers.0.post_attention_layernorm.weight" in tensors
    assert not any("embed" in name or "lm_head" in name for name in tensors)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (config("qwen3", hidden_size=64), "hidden_size is 48 in the head and 64 in the policy"),
        (config("qwen3", vocab_size=97), "vocab_size is 96 in the head and 97 in the policy"),
        (config("qwen2", head_dim=16), "family is qwen3 in the head and qwen2 in the policy"),
        (config("qwen3", num_heads=4), "num_heads is 6 in the head and 4 in the policy"),
        (config("qwen3", rope_theta=1e6), "rope_theta is 5000.0 in the head and 1000000.0"),
    ],
)
def test_a_head_of_another_policy_raises_an_error(
    tmp_path: Path, policy: object, message: str
) -> None:
    saved(tmp_path)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_draft_head(tmp_path, policy)  # type: ignore[arg-type]
    assert "slipstream draft" in str(caught.value)


YARN = YarnScaling(factor=4.0, original_max_position_embeddings=64)


@pytest.mark.parametrize("layout", [None, "vllm", "sglang"])
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_the_head_has_the_policys_rope_scaling(
    tmp_path: Path, kind: str, layout: str | None
) -> None:
    windows: dict[str, Any] = {"sliding_window": 48, "windowed_layers": (1, 2, 3)}
    family = "llama" if kind == "eagle" and layout is not None else "qwen2"
    policy = config(
        family, num_layers=4, rope_scaling=YARN, **(windows if family == "qwen2" else {})
    )
    head = DraftHead(policy) if kind == "eagle" else Eagle3Head(policy, (0, 1, 3))
    head.init_weights(5)
    if layout is None:
        save_draft_head(head, tmp_path)
    else:
        export_draft_head(head, tmp_path, layout)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["rope_scaling"]["rope_type"] == raw["rope_parameters"]["rope_type"] == "yarn"
    assert raw["num_hidden_layers"] == 1
    assert raw.get("layer_types") in (None, ["sliding_attention"])
    for loaded in (load_draft_head(tmp_path, policy), load_draft_head(tmp_path)):
        assert loaded.config.rope_scaling == YARN
        own = loaded.state_dict()
        assert all(torch.equal(tensor, own[n]) for n, tensor in head.state_dict().items())
    if kind == "eagle":
        with pytest.raises(
            CheckpointError, match=r"rope_scaling is .*'factor': 4\.0.* and None in"
        ):
            load_draft_head(tmp_path, replace(policy, rope_scaling=None))


def test_the_number_of_policy_layers_does_not_matter(tmp_path: Path) -> None:
    saved(tmp_path)
    load_draft_head(tmp_path, config("qwen3", num_layers=7))


def test_a_model_with_several_layers_is_no_draft_head(tmp_path: Path) -> None:
    saved(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 3}))
    with pytest.raises(CheckpointError, match="it has 3 layers, but a draft head has 1"):
        load_draft_head(tmp_path, config("qwen3"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", r"tensor fc\.weight is missing"),
        ("extra", r"tensor embed_tokens\.weight is not part of this model"),
        ("shape", r"tensor fc\.weight has shape \(48, 48\), expected \(48, 96\)"),
        ("nan", r"tensor fc\.weight has NaN or infinite values"),
    ],
)
def test_wrong_tensors_are_named(tmp_path: Path, change: str, message: str) -> None:
    saved(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    if change == "missing":
        del tensors["fc.weight"]
    elif change == "extra":
        tensors["embed_tokens.weight"] = torch.zeros(96, 48)
    elif change == "shape":
        tensors["fc.weight"] = torch.zeros(48, 48)
    else:
        tensors["fc.weight"][3, 4] = float("nan")
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_draft_head(tmp_path, config("qwen3"))
    assert "fc.weight, layers.0" in str(caught.value)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        load_draft_head(tmp_path / "nowhere", config("qwen3"))
    saved(tmp_path)
    (tmp_path / WEIGHTS).write_bytes((tmp_path / WEIGHTS).read_bytes()[:200])
    with pytest.raises(CheckpointError, match="corrupt or cut short"):
        load_draft_head(tmp_path, config("qwen3"))
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors"):
        load_draft_head(tmp_path, config("qwen3"))


TOKENS = [0, 2, 4, 70, 95]


@pytest.mark.parametrize("layout", [None, "sglang", "vllm"])
def test_a_draft_vocabulary_survives_a_round_trip(tmp_path: Path, layout: str | None) -> None:
    policy = config("llama")
    head = DraftHead(policy, TOKENS)
    head.init_weights(5)
    if layout is None:
        save_draft_head(head, tmp_path)
    else:
        export_draft_head(head, tmp_path, layout)
    loaded = load_draft_head(tmp_path, policy)
    # vLLM's class for EAGLE-1 heads drafts all tokens.
    assert loaded.tokens == (None if layout == "vllm" else tuple(TOKENS))
    ours, theirs = (dict(each.named_parameters()) for each in (head, loaded))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    stored = load_file(tmp_path / WEIGHTS)
    if layout is None:
        assert stored["d2t"].tolist() == [0, 1, 2, 67, 91]
        assert json.loads((tmp_path / "config.json").read_text())["draft_vocab_size"] == 5
    else:
        # The engines' classes have no such tensors.
        assert not {"d2t", "t2d"} & stored.keys()
    if layout == "sglang":
        assert torch.load(tmp_path / "hot_token_ids.pt", weights_only=True) == TOKENS
        command = LAYOUTS[layout].command(head, policy="p", folder="draft")
        assert command.endswith(" --speculative-token-map draft/hot_token_ids.pt")
        whole = DraftHead(policy)
        assert "token-map" not in LAYOUTS[layout].command(whole, policy="p", folder="draft")


def without_map(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file({n: t for n, t in tensors.items() if n not in ("d2t", "t2d")}, folder / WEIGHTS)


def map_to(tokens: list[int]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS) | {"d2t": torch.tensor(tokens) - torch.arange(5)}
        tensors.pop("t2d")
        save_file(tensors, folder / WEIGHTS)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_map, "a draft vocabulary of 5 of 96 tokens needs d2t"),
        (map_to([0, 3, 4, 70, 95]), r"none of the policy's end tokens \[2\]"),
        (map_to([0, 2, 4, 70, 96]), "must name tokens of the policy's 96"),
        (map_to([0, 2, 2, 70, 95]), "each once and in ascending order"),
    ],
)
def test_a_wrong_draft_vocabulary_raises_an_error(
    tmp_path: Path, change: Callable[[Path], None], message: str
) -> None:
    head = DraftHead(config("llama"), TOKENS)
    head.init_weights(5)
    save_draft_head(head, tmp_path)
    change(tmp_path)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_draft_head(tmp_path, config("llama"))
    assert "slipstream draft" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"no pickle"])
def test_an_unreadable_token_map_raises_an_error(tmp_path: Path, content: bytes) -> None:
    export_draft_head(DraftHead(config("llama"), TOKENS), tmp_path, "sglang")
    (tmp_path / "hot_token_ids.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"hot_token_ids\.pt cannot be read"):
        load_draft_head(tmp_path, config("llama"))
