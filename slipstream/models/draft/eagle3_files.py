"""EAGLE-3 heads as files: what vLLM and SGLang load as `LlamaForCausalLMEagle3`, out and in again.

Tensors have the names of published heads. A draft vocabulary is `d2t`, what must be added to its
ids to have the policy's, and `t2d`, which of the policy's tokens are in it. Both engines read the
tapped layers from `config.json`, counted differently (vLLM 0.32: layers whose input is tapped;
SGLang 0.5: layers whose output is): at the top vLLM's count, which comes first there and is ours,
and in `eagle_config` that of the engine that the file is for. Called by `draft_io` and
`draft_layouts`.
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
from slipstream.models.hf_io import load_tensors

ARCHITECTURE = "LlamaForCausalLMEagle3"

_IDS = "eagle_aux_hidden_state_layer_ids"
_OFFSETS, _MASK = "d2t", "t2d"
_VARIANTS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Of engines' classes, which compute something else where one of these is set."""


def config_of(head: Eagle3Head, dtype: torch.dtype, *, by_outputs: bool = False) -> dict[str, Any]:
    """The contents of `config.json`; `by_outputs`: `eagle_config` counts as SGLang does."""
    aux_layers = list(head.aux_layers)
    return head.config.one_layer().to_hf(dtype=str(dtype).removeprefix("torch.")) | {
        "architectures": [ARCHITECTURE],
        "draft_vocab_size": head.draft_vocab_size,
        _IDS: aux_layers,
        "eagle_config": {
            "use_aux_hidden_state": True,
            _IDS: [aux_layer - by_outputs for aux_layer in aux_layers],
        },
    }


def tensors_of(head: Eagle3Head) -> dict[str, Tensor]:
    """All tensors of the file."""
    found = {name: p.detach() for name, p in head.named_parameters()}
    if head.tokens is not None:
        tokens = torch.tensor(head.tokens)
        known = torch.zeros(head.config.vocab_size, dtype=torch.bool)
        known[tokens] = True
        found |= {_OFFSETS: tokens - torch.arange(len(tokens)), _MASK: known}
    return found


def head_of(
    raw: Mapping[str, Any],
    own: ModelConfig,
    tensors: Mapping[str, Tensor],
    policy: ModelConfig | None,
    folder: Path,
) -> Eagle3Head:
    """A head from `config.json`, as it is and as sizes of the layer, and the tensors beside it.
    `policy` None: for whatever policy.

    Raises CheckpointError where it is for a policy of other sizes, of a variant that is not drafted
    with here, or where auxiliary layers, draft vocabulary or tensors cannot be.
    """
    others = [f"its {name} is set" for name in _VARIANTS if _setting(raw, name)]
    if not others and policy is not None:
        others = [
            f"{name} is {theirs} there and {ours} in the policy"
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
            f"{folder} is no EAGLE-3 head of this policy: {'; '.join(others)}; train one with "
            "`slipstream draft`, or set speculative.eagle.spec_model_path to the folder of one"
        )
    aux_layers = _aux_layers(raw, policy, folder)
    layers = (
        (max(aux_layers) + 1 if aux_layers else NUM_AUX_LAYERS)
        if policy is None
        else policy.num_layers
    )
    positions = own.max_position_embeddings if policy is None else policy.max_position_embeddings
    config = replace(own, num_layers=layers, max_position_embeddings=positions)
    try:
        tokens = _tokens(raw, tensors, own.vocab_size)
        head = Eagle3Head(config, aux_layers, tokens)
    except ConfigError as error:
        raise _unfit(folder, error) from error
    # vLLM's own name of the layer is the other one.
    weights = {
        name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name: tensor
        for name, tensor in tensors.items()
        if name not in (_OFFSETS, _MASK)
    }
    try:
        load_tensors(head, weights, source=str(folder))
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}. An EAGLE-3 head has {', '.join(dict(head.named_parameters()))}, all finite, "
            f"{_OFFSETS} and {_MASK} where it drafts some tokens only, and nothing else: export it "
            "so, or train one with `slipstream draft`"
        ) from error
    return head


def _unfit(folder: Path, why: object) -> CheckpointError:
    return CheckpointError(
        f"{folder}: {why}. It is the head's files that say so: export it anew, or train one with "
        "`slipstream draft`"
    )


def _setting(raw: Mapping[str, Any], name: str) -> object:
    nested = raw.get("eagle_config")
    return raw.get(name) or (isinstance(nested, Mapping) and nested.get(name))


def _aux_layers(
    raw: Mapping[str, Any], policy: ModelConfig | None, folder: Path
) -> tuple[int, ...]:
    """As vLLM reads them."""
    ids = _setting(raw, _IDS)
    if not ids:
        if policy is None:
            raise CheckpointError(
                f"{folder}: config.json does not say which layers of the policy the head reads; "
                f"add {_IDS}"
            )
        try:
            return default_aux_layers(policy.num_layers)
        except ConfigError as error:
            raise _unfit(folder, f"config.json names no auxiliary layers, and {error}") from error
    if not isinstance(ids, Sequence) or not all(type(i) is int for i in ids):
        raise _unfit(folder, f"{_IDS} must be layers' numbers, got {ids!r}")
    return tuple(ids)


def _tokens(
    raw: Mapping[str, Any], tensors: Mapping[str, Tensor], vocab_size: int
) -> tuple[int, ...] | None:
    """The draft vocabulary. Raises ConfigError where its tensors do not make one."""
    size = raw.get("draft_vocab_size") or vocab_size
    offsets, known = tensors.get(_OFFSETS), tensors.get(_MASK)
    if offsets is None and size == vocab_size:
        return None
    if offsets is None or offsets.dtype not in (torch.int32, torch.int64):
        shown = "missing" if offsets is None else f"of {offsets.dtype}"
        raise ConfigError(
            f"a draft vocabulary of {size} of {vocab_size} tokens needs {_OFFSETS}, whole numbers "
            f"that lead from its ids to the policy's, which is {shown}; export the head anew"
        )
    if offsets.shape != (size,):
        raise ConfigError(
            f"{_OFFSETS} has shape {tuple(offsets.shape)}, and draft_vocab_size is {size}; export "
            "the head anew"
        )
    tokens = (offsets.long() + torch.arange(len(offsets))).tolist()
    if known is not None:
        named = set(known.flatten().nonzero()[:, 0].tolist())
        if known.shape != (vocab_size,) or named != set(tokens):
            raise ConfigError(
                f"{_MASK} names other tokens than {_OFFSETS}, or is not one number for each of "
                f"{vocab_size}; export the head anew"
            )
    return None if tokens == list(range(vocab_size)) else tuple(tokens)
