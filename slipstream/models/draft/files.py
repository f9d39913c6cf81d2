"""Read and write draft heads as folders with `config.json` and `model.safetensors`.

Tensors have the names of published EAGLE heads. The policy's tensors are not among them: the
embedding and, for EAGLE-1, the LM head. Saving is not atomic. The caller must ensure that no reader
sees a half-written folder.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from slipstream.errors import CheckpointError, ConfigError
from slipstream.models.config import ModelConfig
from slipstream.models.draft import eagle3_files
from slipstream.models.draft.eagle1 import DraftHead
from slipstream.models.draft.eagle3 import Eagle3Head
from slipstream.models.draft.layouts import own_tensors
from slipstream.models.draft.model import DraftModel, check_end_tokens
from slipstream.models.draft.token_map import (
    MASK,
    OFFSETS,
    SIZE,
    listed_tokens,
    map_tensors,
    tokens_in,
)
from slipstream.models.hf_io import (
    architectures,
    load_config,
    load_tensors,
    read_json,
    read_tensors,
    write_tensors,
)
from slipstream.reading import reading

ARCHITECTURES = {
    "llama": "EagleLlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLMEagle",
    "qwen3": "Qwen3ForCausalLMEagle",
    "mistral": "MistralForCausalLMEagle",
}
"""Architecture names by family: for Llama as in vLLM, for Qwen2 as in SGLang and FastRL. No engine
has a class for Qwen3 or Mistral. `layouts` has the other requirements of the engines."""

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
    """Write `head` into `folder`. Existing files are overwritten."""
    if isinstance(head, Eagle3Head):
        config = eagle3_files.config_of(head, dtype)
        write_tensors(folder, config, eagle3_files.tensors_of(head), dtype=dtype)
        return
    config = head.config.one_layer().to_hf(dtype=str(dtype).removeprefix("torch."))
    config |= {"architectures": [ARCHITECTURES[head.config.family]]}
    if head.draft_tokens is not None:
        config[SIZE] = head.draft_vocab_size
    tensors = {name: p.detach() for name, p in head.named_parameters()} | map_tensors(head)
    write_tensors(folder, config, tensors, dtype=dtype)


def load_draft_head(folder: Path, policy: ModelConfig | None = None) -> DraftModel:
    """Return the head in `folder` with fp32 parameters.

    The folder may have our layout or one of `layouts.LAYOUTS`. `policy` is the architecture for
    which the head must fit; None accepts any.

    Raises CheckpointError if the head belongs to a policy of another family or size (the error
    names both values), if a file is missing or unreadable (the error names it), or if tensors are
    missing, unexpected, misshapen or not finite.
    """
    with reading(folder, CheckpointError, "train a draft head with `slipstream draft`"):
        head = _load(folder, policy)
    if head.tokens is not None and policy is not None:
        try:
            check_end_tokens(head.tokens, policy.eos_token_ids)
        except ConfigError as error:
            raise CheckpointError(f"{folder}: {error}") from error
    return head


def _load(folder: Path, policy: ModelConfig | None) -> DraftModel:
    theirs = load_config(folder)
    is_eagle3 = any("eagle3" in name.lower() for name in _architectures(folder))
    if theirs.num_layers != 1:
        raise _not_of_this_policy(
            folder, [f"it has {theirs.num_layers} layers, but a draft head has 1"]
        )
    different = [] if is_eagle3 or policy is None else _different(theirs, policy)
    if different:
        raise _not_of_this_policy(folder, different)
    try:
        tensors = read_tensors(folder)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}; put a complete draft head there, or train one with `slipstream draft`"
        ) from error
    if is_eagle3:
        return eagle3_files.head_of(_config(folder), theirs, tensors, policy, folder)
    sizes = theirs if policy is None else policy
    try:
        tokens = listed_tokens(folder) or tokens_in(_config(folder), tensors, sizes.vocab_size)
        head = DraftHead(sizes, tokens)
    except ConfigError as error:
        raise CheckpointError(
            f"{folder}: {error}. The values are in the head's files; train another head with "
            "`slipstream draft`"
        ) from error
    weights = {n: t for n, t in own_tensors(tensors).items() if n not in (OFFSETS, MASK)}
    try:
        load_tensors(head, weights, source=str(folder))
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}. A draft head has {', '.join(dict(head.named_parameters()))}, all finite, "
            f"also {OFFSETS} and {MASK} if its vocabulary is smaller than the policy's, and "
            "nothing else; export it like this, or train one with `slipstream draft`"
        ) from error
    return head


def aux_layers_in(folder: Path, policy: ModelConfig) -> tuple[int, ...]:
    """The auxiliary layers that a head of `policy` in a folder reads, none for EAGLE.

    Raises CheckpointError if they cannot be told from `config.json`.
    """
    if not any("eagle3" in name.lower() for name in _architectures(folder)):
        return ()
    return eagle3_files.aux_layers(_config(folder), policy, folder)


def _different(theirs: ModelConfig, policy: ModelConfig) -> list[str]:
    ours, found = asdict(policy), asdict(theirs)
    return [
        f"{name} is {found[name]} in the head and {ours[name]} in the policy"
        for name in _MUST_AGREE
        if found[name] != ours[name]
    ]


def _not_of_this_policy(folder: Path, why: list[str]) -> CheckpointError:
    return CheckpointError(
        f"{folder} is no draft head for this policy: {'; '.join(why)}; train one with "
        "`slipstream draft`, or set speculative.eagle.spec_model_path to the folder of one"
    )


def is_draft_head(folder: Path) -> bool:
    """Return whether `folder` holds a draft head in any layout, judged by its `config.json`."""
    there = (folder / "config.json").is_file()
    return there and any("eagle" in name.lower() for name in _architectures(folder))


def _architectures(folder: Path) -> list[str]:
    """Return the architecture names in `config.json`, which must be readable."""
    return architectures(folder)


def _config(folder: Path) -> dict[str, Any]:
    return read_json(folder / "config.json")
