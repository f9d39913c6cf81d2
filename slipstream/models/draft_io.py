"""Draft heads as folders: `config.json` and `model.safetensors`, as EAGLE heads are published.

Tensors have the names of published heads; embedding and LM head, which are the policy's, are not
among them. Writes plainly into a folder: that nobody sees half of it is the caller's matter.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch

from slipstream.errors import CheckpointError
from slipstream.models.config import ModelConfig
from slipstream.models.draft_head import DraftHead
from slipstream.models.draft_layouts import own_tensors
from slipstream.models.hf_io import load_config, load_tensors, read_tensors, write_model

ARCHITECTURES = {
    "llama": "EagleLlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLMEagle",
    "qwen3": "Qwen3ForCausalLMEagle",
}
"""Llama's as vLLM names it, Qwen2's as SGLang and FastRL do; no engine has one for Qwen3 yet.
What engines want besides is in `draft_layouts`."""

_MUST_AGREE = (
    "family",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "rope_theta",
    "rms_norm_eps",
)


def save_draft_head(head: DraftHead, folder: Path, *, dtype: torch.dtype = torch.float32) -> None:
    """Write `head` into `folder`, over what it holds."""
    config = head.config.to_hf(dtype=str(dtype).removeprefix("torch."))
    config |= {"architectures": [ARCHITECTURES[head.config.family]], "num_hidden_layers": 1}
    write_model(folder, config, head, dtype=dtype)


def load_draft_head(folder: Path, policy: ModelConfig) -> DraftHead:
    """A head with fp32 parameters for the policy of that architecture, from a folder of ours or in
    one of `draft_layouts`.

    Raises CheckpointError, naming both sides, where the head was made for a policy of another
    family or other sizes, and naming the file where it is missing or cannot be read, or where
    tensors are missing, extra, misshapen or not finite.
    """
    theirs = load_config(folder)
    ours, found = asdict(policy), asdict(theirs)
    different = [
        f"{name} is {found[name]} there and {ours[name]} in the policy"
        for name in _MUST_AGREE
        if found[name] != ours[name]
    ]
    if theirs.num_layers != 1:
        different.append(f"it has {theirs.num_layers} layers and a draft head has 1")
    different += [
        f"it is an {name}, and only heads of EAGLE-1 and EAGLE-2 draft here"
        for name in _architectures(folder)
        if "eagle3" in name.lower()
    ]
    if different:
        raise CheckpointError(
            f"{folder} is no draft head of this policy: {'; '.join(different)}; train one with "
            "`slipstream draft`, or set speculative.eagle.spec_model_path to the folder of one"
        )
    try:
        tensors = read_tensors(folder)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}; put a whole draft head there, or train one with `slipstream draft`"
        ) from error
    head = DraftHead(policy)
    try:
        load_tensors(head, own_tensors(tensors), source=str(folder))
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}. A draft head has {', '.join(dict(head.named_parameters()))}, all finite, "
            "and nothing else: export it so, or train one with `slipstream draft`"
        ) from error
    return head


def is_draft_head(folder: Path) -> bool:
    """Whether there is one, of whatever engine's layout, by its configuration."""
    there = (folder / "config.json").is_file()
    return there and any("eagle" in name.lower() for name in _architectures(folder))


def _architectures(folder: Path) -> list[str]:
    """As its configuration, which has been read, names them."""
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return [str(name) for name in raw.get("architectures") or ()]
