"""One interface to both kinds of policy: the built-in decoder and `HFPolicy` (transformers).

It covers what trainers and loops need of a policy: loading, saving, weights and packing. `training`
and `loops` call it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from slipstream.models.config import Family, ModelConfig
from slipstream.models.decoder import Decoder, PackedDecoder, supports_varlen
from slipstream.models.hf_io import (
    load_checkpoint,
    load_config,
    load_sharded_weights,
    load_tensors,
    map_checkpoint,
    read_json,
    read_tensors,
    save_checkpoint,
)
from slipstream.models.hf_policy import (
    HFPolicy,
    HFPolicyConfig,
    PackedHFPolicy,
    hf_policy_config,
    load_hf_policy,
)
from slipstream.models.lora import LoraLinear, lora_layers, named_weights
from slipstream.models.sharded import ShardedDecoder, is_sharded, shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Implementation: TypeAlias = Literal["auto", "slipstream", "transformers"]
Policy: TypeAlias = Decoder | HFPolicy
PolicyConfig: TypeAlias = ModelConfig | HFPolicyConfig
PackedPolicy: TypeAlias = PackedDecoder | PackedHFPolicy | ShardedDecoder


def policy_config(
    folder: Path, implementation: Implementation = "auto", *, positions: int | None = None
) -> PolicyConfig:
    """Return the architecture of the checkpoint in `folder`.

    `positions` replaces the `max_position_embeddings` of its config.json.
    `auto` selects the built-in decoder for the families that it supports, and transformers for all
    others. Raises CheckpointError, which names the file, if the configuration cannot be read.
    """
    return (
        hf_policy_config(folder, positions=positions)
        if _needs_transformers(folder, implementation)
        else load_config(folder, positions=positions)
    )


def load_policy(
    folder: Path,
    implementation: Implementation = "auto",
    *,
    device: torch.device | None = None,
    positions: int | None = None,
    trained: bool = True,
) -> Policy:
    """Return the policy in `folder`. Raises CheckpointError.

    Parameters are fp32 if the policy is `trained`. Otherwise those of a decoder on the CPU are
    mapped from the files, in their dtype (`map_checkpoint`). `implementation` and `positions` are
    as in `policy_config`.
    """
    if _needs_transformers(folder, implementation):
        return load_hf_policy(folder, device=device, positions=positions)
    if not trained and (device is None or device.type == "cpu"):
        return map_checkpoint(folder, positions=positions)
    return load_checkpoint(folder, device=device, positions=positions)


def load_sharded(
    folder: Path, mesh: DeviceMesh, *, device: torch.device, positions: int | None = None
) -> Decoder:
    """Return the decoder in `folder`, sharded over `mesh`. No process ever holds all weights.

    `positions` is as in `policy_config`. Raises CheckpointError.
    """
    with torch.device("meta"):
        decoder = Decoder(load_config(folder, positions=positions))
    shard(decoder, mesh).to_empty(device=device)
    load_sharded_weights(decoder, folder)
    return decoder


def save_policy(
    policy: Policy,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    generation: Mapping[str, Any] | None = None,
    save_tokenizer: Callable[[str], object] | None = None,
) -> None:
    """Write a folder that `AutoModelForCausalLM.from_pretrained` loads.

    `generation` and `save_tokenizer` are as in `hf_io.save_checkpoint`. An `HFPolicy` ignores
    `generation` and keeps its own generation config.
    """
    if isinstance(policy, HFPolicy):
        policy.save(folder, dtype=dtype, save_tokenizer=save_tokenizer)
    else:
        save_checkpoint(
            policy, folder, dtype=dtype, generation=generation, save_tokenizer=save_tokenizer
        )


def add_end_tokens(policy: Policy, ids: Sequence[int]) -> None:
    """Let generation with `policy` end at `ids`, too, and store them in its checkpoints."""
    if not isinstance(policy, HFPolicy):
        policy.config = policy.config.with_end_tokens(ids)
        return
    before, policy.config = policy.config, policy.config.with_end_tokens(ids)
    if policy.config != before:
        ends = policy.config.eos_token_ids
        policy.model.generation_config.eos_token_id = list(ends) if len(ends) > 1 else ends[0]


def load_weights(policy: Policy, tensors: Mapping[str, Tensor], *, source: str) -> None:
    """Copy `tensors`, with the names of `policy_weights`, into `policy`.

    All tensors are checked before any weight changes. Raises CheckpointError.
    """
    if isinstance(policy, HFPolicy):
        policy.load_tensors(tensors, source=source)
    else:
        load_tensors(policy, tensors, source=source)


def load_weights_from(policy: Policy, folder: Path) -> None:
    """Copy the weights of the checkpoint in `folder` into `policy`. Raises CheckpointError."""
    if isinstance(policy, HFPolicy):
        policy.load_folder(folder)
    elif is_sharded(policy):
        load_sharded_weights(policy, folder)
    else:
        load_tensors(policy, read_tensors(folder), source=str(folder))


def policy_weights(policy: Policy) -> Iterator[tuple[str, Tensor | LoraLinear]]:
    """Yield all weights under their Hugging Face names, as `lora.named_weights` does."""
    return policy.weights() if isinstance(policy, HFPolicy) else named_weights(policy)


def pack(policy: Policy, dtype: torch.dtype) -> PackedPolicy:
    """Return the policy in compute form. Differentiable with respect to its parameters."""
    if isinstance(policy, Decoder) and is_sharded(policy):
        base_only = not all(layer.enabled for layer in lora_layers(policy).values())
        return ShardedDecoder(policy, dtype, base_only)
    return policy.pack(dtype)


def needs_padding(policy: Policy, dtype: torch.dtype) -> bool:
    """Return whether a forward pass needs sequences padded to one length."""
    if isinstance(policy, HFPolicy):
        return True
    return not supports_varlen(policy.config, dtype, policy.device)


def _needs_transformers(folder: Path, implementation: Implementation) -> bool:
    if implementation != "auto" or not (folder / "config.json").is_file():
        return implementation == "transformers"
    return read_json(folder / "config.json").get("model_type") not in get_args(Family)
