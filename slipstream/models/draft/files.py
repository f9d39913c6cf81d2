"""Draft heads as folders: `config.json` and `model.safetensors`, as EAGLE heads are published.

Tensors have the names of published heads; what is the policy's, the embedding and, but in EAGLE-3,
the LM head, is not among them. Writes plainly into a folder: that nobody sees half of it is the
caller's matter.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from slipstream.errors import CheckpointError
from slipstream.models.config import ModelConfig
from slipstream.models.draft import eagle3_files
from slipstream.models.draft.eagle1 import DraftHead
from slipstream.models.draft.eagle3 import Eagle3Head
from slipstream.models.draft.layouts import own_tensors
from slipstream.models.draft.model import DraftModel
from slipstream.models.hf_io import (
    load_config,
    load_tensors,
    read_tensors,
    write_model,
    write_tensors,
)

ARCHITECTURES = {
    "llama": "EagleLlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLMEagle",
    "qwen3": "Qwen3ForCausalLMEagle",
    "mistral": "MistralForCausalLMEagle",
}
"""Llama's as vLLM names it, Qwen2's as SGLang and FastRL do; no engine has one for Qwen3
or Mistral.
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
    "rope_scaling",
    "rms_norm_eps",
)


def save_draft_head(head: DraftModel, folder: Path, *, dtype: torch.dtype = torch.float32) -> None:
    """Write `head` into `folder`, over what it holds."""
    if isinstance(head, Eagle3Head):
        config = eagle3_files.config_of(head, dtype)
        write_tensors(folder, config, eagle3_files.tensors_of(head), dtype=dtype)
        return
    config = head.config.one_layer().to_hf(dtype=str(dtype).removeprefix("torch."))
    config |= {"architectures": [ARCHITECTURES[head.config.family]]}
    write_model(folder, config, head, dtype=dtype)


def load_draft_head(folder: Path, policy: ModelConfig | None = None) -> DraftModel:
    """A head with fp32 parameters for the policy of that architecture (None: for whatever policy it
    was made for), from a folder of ours or in one of `draft_layouts`.

    Raises CheckpointError, naming both sides, where the head was made for a policy of another
    family or other sizes, and naming the file where it is missing or cannot be read, or where
    tensors are missing, extra, misshapen or not finite.
    """
    theirs = load_config(folder)
    third = any("eagle3" in name.lower() for name in _architectures(folder))
    if theirs.num_layers != 1:
        raise _not_of_this_policy(
            folder, [f"it has {theirs.num_layers} layers and a draft head has 1"]
        )
    different = [] if third or policy is None else _different(theirs, policy)
    if different:
        raise _not_of_this_policy(folder, different)
    try:
        tensors = read_tensors(folder)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}; put a whole draft head there, or train one with `slipstream draft`"
        ) from error
    if third:
        return eagle3_files.head_of(_config(folder), theirs, tensors, policy, folder)
    head = DraftHead(theirs if policy is None else policy)
    try:
        load_tensors(head, own_tensors(tensors), source=str(folder))
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}. A draft head has {', '.join(dict(head.named_parameters()))}, all finite, "
            "and nothing else: export it so, or train one with `slipstream draft`"
        ) from error
    return head


def _different(theirs: ModelConfig, policy: ModelConfig) -> list[str]:
    ours, found = asdict(policy), asdict(theirs)
    return [
        f"{name} is {found[name]} there and {ours[name]} in the policy"
        for name in _MUST_AGREE
        if found[name] != ours[name]
    ]


def _not_of_this_policy(folder: Path, why: list[str]) -> CheckpointError:
    return CheckpointError(
        f"{folder} is no draft head of this policy: {'; '.join(why)}; train one with "
        "`slipstream draft`, or set speculative.eagle.spec_model_path to the folder of one"
    )


def is_draft_head(folder: Path) -> bool:
    """Whether there is one, of whatever engine's layout, by its configuration."""
    there = (folder / "config.json").is_file()
    return there and any("eagle" in name.lower() for name in _architectures(folder))


def _architectures(folder: Path) -> list[str]:
    """As its configuration, which has been read, names them."""
    return [str(name) for name in _config(folder).get("architectures") or ()]


def _config(folder: Path) -> dict[str, Any]:
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert isinstance(raw, dict), "it has been read before"
    return raw
