"""Read and write EAGLE-3 heads as the files that vLLM and SGLang load as `LlamaForCausalLMEagle3`.

Tensors have the names of published heads.

Both engines read the auxiliary layers from `config.json`, but number them differently. vLLM 0.32
names a layer whose input is read, as we do; SGLang 0.5 names the layer whose output is read. The
top level of the file has vLLM's numbers, which vLLM reads first. `eagle_config` has the numbers of
the engine for which the file is written. `models.draft.files` and `models.draft.layouts` call this
module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import CheckpointError, ConfigError
from slipstream.models.config import ModelConfig
from slipstream.models.draft.eagle3 import NUM_AUX_LAYERS, Eagle3Head, default_aux_layers
from slipstream.models.draft.token_map import MASK, OFFSETS, SIZE, map_tensors, tokens_in
from slipstream.models.hf_io import load_tensors

ARCHITECTURE = "LlamaForCausalLMEagle3"

_IDS = "eagle_aux_hidden_state_layer_ids"
_VARIANTS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Settings with which the engines' classes compute something other than this head."""


def config_of(head: Eagle3Head, dtype: torch.dtype, *, by_outputs: bool = False) -> dict[str, Any]:
    """Return the contents of `config.json`.

    With `by_outputs`, `eagle_config` numbers auxiliary layers as SGLang does.
    """
    layer_ids = list(head.aux_layers)
    return head.config.one_layer().to_hf(dtype=str(dtype).removeprefix("torch.")) | {
        "architectures": [ARCHITECTURE],
        SIZE: head.draft_vocab_size,
        _IDS: layer_ids,
        "eagle_config": {
            "use_aux_hidden_state": True,
            _IDS: [layer - by_outputs for layer in layer_ids],
        },
    }


def tensors_of(head: Eagle3Head) -> dict[str, Tensor]:
    """Return all tensors of the file by name."""
    return {name: p.detach() for name, p in head.named_parameters()} | map_tensors(head)


def head_of(
    raw: Mapping[str, Any],
    own: ModelConfig,
    tensors: Mapping[str, Tensor],
    policy: ModelConfig | None,
    folder: Path,
) -> Eagle3Head:
    """Return the head in a folder.

    `raw` is its `config.json`, `own` the sizes of the layer from it, and `tensors` its weights.
    With `policy` None, the head may belong to any policy. Raises CheckpointError if the head is for
    a policy of other sizes, if it is an unsupported variant, or if auxiliary layers, draft
    vocabulary or tensors are invalid.
    """
    others = [f"its {name} is set" for name in _VARIANTS if _setting(raw, name)]
    if not others and policy is not None:
        others = [
            f"{name} is {theirs} in the head and {ours} in the policy"
            for name, theirs, ours in (
                ("vocab_size", own.vocab_size, policy.vocab_size),
                ("hidden_size", own.hidden_size, policy.hidden_size),
                (
                    "target_hidden_size",
                    raw.get("target_hidden_size", own.hidden_size),
                    own.hidden_size,
                ),
            )
            if theirs != ours
        ]
    if others:
        raise CheckpointError(
            f"{folder} is no EAGLE-3 head for this policy: {'; '.join(others)}; train one with "
            "`slipstream draft`, or set speculative.eagle.spec_model_path to the folder of one"
        )
    layer_ids = aux_layers(raw, policy, folder)
    layers = (
        (max(layer_ids) + 1 if layer_ids else NUM_AUX_LAYERS)
        if policy is None
        else policy.num_layers
    )
    positions = own.max_position_embeddings if policy is None else policy.max_position_embeddings
    config = replace(own, num_layers=layers, max_position_embeddings=positions)
    try:
        tokens = tokens_in(raw, tensors, own.vocab_size)
        head = Eagle3Head(config, layer_ids, tokens)
    except ConfigError as error:
        raise _unfit(folder, error) from error
    # vLLM's own heads name the layer `layers.0`.
    weights = {
        name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name: tensor
        for name, tensor in tensors.items()
        if name not in (OFFSETS, MASK)
    }
    try:
        load_tensors(head, weights, source=str(folder))
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}. An EAGLE-3 head has {', '.join(dict(head.named_parameters()))}, all finite, "
            f"also {OFFSETS} and {MASK} if its vocabulary is smaller than the policy's, and "
            "nothing else; export it like this, or train one with `slipstream draft`"
        ) from error
    return head


def _unfit(folder: Path, why: object) -> CheckpointError:
    return CheckpointError(
        f"{folder}: {why}. The values are in the head's files: export the head again, or train one "
        "with `slipstream draft`"
    )


def _setting(raw: Mapping[str, Any], name: str) -> object:
    nested = raw.get("eagle_config")
    return raw.get(name) or (isinstance(nested, Mapping) and nested.get(name))


def aux_layers(raw: Mapping[str, Any], policy: ModelConfig | None, folder: Path) -> tuple[int, ...]:
    """Return the auxiliary layers, numbered as in vLLM. Raises CheckpointError if `config.json`
    does not name them."""
    ids = _setting(raw, _IDS)
    if not ids:
        if policy is None:
            raise CheckpointError(
                f"{folder}: config.json does not name the layers of the policy that the head "
                f"reads; add {_IDS}"
            )
        try:
            return default_aux_layers(policy.num_layers)
        except ConfigError as error:
            raise _unfit(folder, f"config.json names no auxiliary layers, and {error}") from error
    if not isinstance(ids, Sequence) or not all(type(i) is int for i in ids):
        raise _unfit(folder, f"{_IDS} must be a list of layer indices, got {ids!r}")
    return tuple(ids)
