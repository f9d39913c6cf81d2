"""EAGLE-3 heads as files: round trips, the layouts of the engines, and error messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.errors import CheckpointError
from slipstream.models.draft.eagle3 import Eagle3Head
from slipstream.models.draft.files import is_draft_head, load_draft_head, save_draft_head
from slipstream.models.draft.layouts import LAYOUTS, export_draft_head
from slipstream.models.hf_io import WEIGHTS
from tests.models.helpers import config

TOKENS = [0, 2, 4, 70, 95]
POLICY = config("qwen3", num_layers=5)


def made(tokens: list[int] | None = TOKENS) -> Eagle3Head:
    head = Eagle3Head(POLICY, (0, 2, 4), tokens)
    head.init_weights(5)
    return head


def same(one: Eagle3Head, other: object) -> bool:
    assert isinstance(other, Eagle3Head)
    ours, theirs = one.state_dict(), other.state_dict()
    return one.is_like(other) and all(torch.equal(t, theirs[name]) for name, t in ours.items())


@pytest.mark.parametrize("tokens", [TOKENS, None])
@pytest.mark.parametrize("layout", [None, *LAYOUTS])
def test_a_head_survives_a_round_trip_bit_for_bit(
    tmp_path: Path, tokens: list[int] | None, layout: str | None
) -> None:
    head = made(tokens)
    if layout is None:
        save_draft_head(head, tmp_path)
    else:
        export_draft_head(head, tmp_path, layout)
    assert is_draft_head(tmp_path)
    assert same(head, load_draft_head(tmp_path, POLICY))
    # Without a policy, as in an export that knows only the head's folder.
    unknown = load_draft_head(tmp_path)
    assert isinstance(unknown, Eagle3Head)
    assert (unknown.aux_layers, unknown.tokens) == (head.aux_layers, head.tokens)


@pytest.mark.parametrize(("layout", "nested"), [("vllm", [0, 2, 4]), ("sglang", [-1, 1, 3])])
def test_the_folder_has_the_layout_that_engines_read(
    tmp_path: Path, layout: str, nested: list[int]
) -> None:
    """vLLM 0.32: `llama_eagle3.py`, `_get_eagle3_aux_layers_from_config`; SGLang 0.5:
    `set_eagle3_layers_to_capture`, which adds 1."""
    export_draft_head(made(), tmp_path, layout, dtype=torch.bfloat16)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["architectures"] == ["LlamaForCausalLMEagle3"]
    assert raw["model_type"] == "llama"
    assert (raw["num_hidden_layers"], raw["vocab_size"], raw["draft_vocab_size"]) == (1, 96, 5)
    assert raw["tie_word_embeddings"] is False
    assert raw["eagle_aux_hidden_state_layer_ids"] == [0, 2, 4]
    assert raw["eagle_config"] == {
        "use_aux_hidden_state": True,
        "eagle_aux_hidden_state_layer_ids": nested,
    }
    tensors = load_file(tmp_path / WEIGHTS)
    assert tensors["fc.weight"].dtype == torch.bfloat16
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (96, 96)
    assert tensors["lm_head.weight"].shape == (5, 48)
    assert tensors["d2t"].tolist() == [0, 1, 2, 67, 91]
    assert tensors["t2d"].dtype == torch.bool
    assert tensors["t2d"].nonzero()[:, 0].tolist() == TOKENS
    assert not any("embed" in name for name in tensors)


def test_without_a_draft_vocabulary_the_file_has_no_d2t_and_t2d(tmp_path: Path) -> None:
    """vLLM's class has no parameters for them then."""
    export_draft_head(made(None), tmp_path, "vllm")
    assert not {"d2t", "t2d"} & load_file(tmp_path / WEIGHTS).keys()
    assert json.loads((tmp_path / "config.json").read_text())["draft_vocab_size"] == 96


def test_serving_commands_name_the_algorithm() -> None:
    texts = [layout.command(made(), policy="P", folder="H") for layout in LAYOUTS.values()]
    assert '"method": "eagle3", "model": "H"' in texts[0]
    assert "--speculative-algorithm EAGLE3" in texts[1]


def test_the_heads_layer_may_have_other_sizes_than_the_policys(tmp_path: Path) -> None:
    """Published heads have their own feed-forward width. max_position_embeddings is the policy's,
    because drafting does not need the head's."""
    theirs = config("llama", num_layers=5, intermediate_size=96, max_position_embeddings=32)
    head = Eagle3Head(theirs, (0, 2, 4))
    save_draft_head(head, tmp_path)
    loaded = load_draft_head(tmp_path, POLICY)
    assert loaded.config.intermediate_size == 96
    assert loaded.config.max_position_embeddings == POLICY.max_position_embeddings


def rename(tensors: dict[str, Any]) -> None:
    for name in [n for n in tensors if n.startswith("midlayer.")]:
        tensors[name.replace("midlayer.", "layers.0.")] = tensors.pop(name)


def changed(folder: Path, tensors: Callable[[dict[str, Any]], object], **settings: object) -> None:
    save_draft_head(made(), folder)
    found, path = load_file(folder / WEIGHTS), folder / "config.json"
    tensors(found)
    save_file(found, folder / WEIGHTS)
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def test_the_layer_may_have_vllms_name(tmp_path: Path) -> None:
    changed(tmp_path, rename)
    assert same(made(), load_draft_head(tmp_path, POLICY))


def test_aux_layers_default_to_vllms_if_the_file_names_none(tmp_path: Path) -> None:
    policy = config("qwen3", num_layers=9)
    head = Eagle3Head(policy, (2, 4, 6), TOKENS)
    head.init_weights(5)
    save_draft_head(head, tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    del raw["eagle_aux_hidden_state_layer_ids"], raw["eagle_config"]
    path.write_text(json.dumps(raw))
    assert same(head, load_draft_head(tmp_path, policy))
    with pytest.raises(CheckpointError, match="names no auxiliary layers"):
        load_draft_head(tmp_path, POLICY)


def put(name: str, value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda tensors: tensors.update({name: value})


def keep(tensors: dict[str, Any]) -> None:
    pass


NAN = torch.full((48, 144), float("nan"))


@pytest.mark.parametrize(
    ("tensors", "settings", "message"),
    [
        (lambda t: t.pop("fc.weight"), {}, r"tensor fc\.weight is missing"),
        (put("embed_tokens.weight", torch.zeros(96, 48)), {}, "embed_tokens.weight is not part"),
        (put("fc.weight", torch.zeros(48, 96)), {}, r"shape \(48, 96\), expected \(48, 144\)"),
        (put("fc.weight", NAN), {}, "fc.weight has NaN or infinite values"),
        (put("lm_head.weight", torch.zeros(6, 48)), {}, r"lm_head\.weight has shape \(6, 48\)"),
        (lambda t: t.pop("d2t"), {}, "5 of 96 tokens needs d2t.*missing"),
        (put("d2t", torch.zeros(5)), {}, "needs d2t.*of torch.float32"),
        (put("d2t", torch.arange(6)), {}, r"d2t has shape \(6,\), but draft_vocab_size is 5"),
        (put("d2t", torch.tensor([0, 2, 2, 67, 92])), {}, "t2d names other tokens than d2t"),
        (put("t2d", torch.ones(5, dtype=torch.bool)), {}, "t2d names other tokens than d2t"),
        (keep, {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}, r"not of \[0, 2, 5\]"),
        (keep, {"eagle_aux_hidden_state_layer_ids": [0, 2]}, r"not of \[0, 2\]"),
        (keep, {"eagle_aux_hidden_state_layer_ids": "all"}, "layer_ids must be .* got 'all'"),
        (keep, {"norm_before_residual": True}, "its norm_before_residual is set"),
        (keep, {"eagle_config": {"norm_before_fc": True}}, "its norm_before_fc is set"),
        (keep, {"target_hidden_size": 64}, "target_hidden_size is 64 in the head and 48 in the"),
        (keep, {"num_hidden_layers": 2}, "it has 2 layers"),
        (keep, {"vocab_size": 90}, "vocab_size is 90 in the head and 96 in the policy"),
        (keep, {"attention_bias": True}, "attention_bias=true is not supported"),
    ],
)
def test_heads_that_do_not_fit_the_policy_raise_an_error(
    tmp_path: Path,
    tensors: Callable[[dict[str, Any]], object],
    settings: dict[str, object],
    message: str,
) -> None:
    changed(tmp_path, tensors, **settings)
    with pytest.raises(CheckpointError, match=message):
        load_draft_head(tmp_path, POLICY)


@pytest.mark.parametrize("offsets", [[0, 0, 0, 0, -1], [-1, 2, 2, 67, 91], [0, 2, 2, 67, 92]])
def test_invalid_d2t_offsets_raise_an_error(tmp_path: Path, offsets: list[int]) -> None:
    def without_mask(tensors: dict[str, Any]) -> None:
        tensors["d2t"] = torch.tensor(offsets)
        del tensors["t2d"]

    changed(tmp_path, without_mask)
    with pytest.raises(CheckpointError, match="policy's 96, each once"):
        load_draft_head(tmp_path, POLICY)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    save_draft_head(made(), tmp_path)
    (tmp_path / WEIGHTS).write_bytes((tmp_path / WEIGHTS).read_bytes()[:200])
    with pytest.raises(CheckpointError, match="corrupt or cut short"):
        load_draft_head(tmp_path, POLICY)
