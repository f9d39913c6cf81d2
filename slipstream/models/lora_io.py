"""Read and write LoRA adapters as `peft` folders.

A folder holds adapter_config.json and adapter_model.safetensors
(https://huggingface.co/docs/peft/developer_guides/checkpoint). `hf_io.save_checkpoint` writes the
merged model. This module knows names and files; `lora` has the layers.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from slipstream.errors import CheckpointError, ConfigError
from slipstream.models.decoder import Decoder
from slipstream.models.hf_io import read_json
from slipstream.models.lora import LoraConfig, add_lora, lora_layers
from slipstream.models.sharded import full
from slipstream.reading import reading, reason, shown, shown_path

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_KEY = re.compile(r"base_model\.model\.(.+)\.(lora_[AB])\.weight")

_UNKNOWN = (
    "use_dora",
    "use_rslora",
    "use_qalora",
    "use_bdlora",
    "fan_in_fan_out",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "velora_config",
    "monteclora_config",
)
"""Settings with which an adapter computes something other than W x + alpha / r * B A x."""

_INITS = frozenset({"gaussian", "eva", "orthogonal"})
"""Values of `init_lora_weights` that leave the base weights unchanged. Others, such as PiSSA's,
subtract the initial adapter from them."""


def save_adapter(decoder: Decoder, folder: Path, *, base_model: str | None = None) -> None:
    """Write the adapter of `decoder` in fp32 as a folder for `peft.PeftModel.from_pretrained`.

    `base_model` is the name or folder of the base model, which the configuration records.

    Raises:
        ConfigError: the decoder has no adapter.
    """
    layers = lora_layers(decoder)
    if not layers:
        raise ConfigError(f"{folder}: this model has no LoRA adapter; save the whole model instead")
    config = next(iter(layers.values())).config
    tensors = {
        f"base_model.model.{name}.{part}.weight": full(getattr(layer, part).detach())
        .to("cpu", torch.float32)
        .contiguous()
        for name, layer in layers.items()
        for part in ("lora_A", "lora_B")
    }
    whole = config.alpha == int(config.alpha)
    raw = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": config.rank,
        "lora_alpha": int(config.alpha) if whole else config.alpha,
        "lora_dropout": 0.0,
        "target_modules": _shortest(decoder, list(layers)),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(raw, indent=2) + "\n")
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})


def load_adapter(decoder: Decoder, folder: Path) -> LoraConfig:
    """Add the adapter in `folder` to `decoder` for further training. Return its configuration.

    The adapter's dropout setting is ignored.

    Raises:
        CheckpointError: files are missing or corrupt, the adapter belongs to another model, or it
            computes something other than plain LoRA.
    """
    config, tensors = read_adapter(folder)
    path = folder / ADAPTER_WEIGHTS
    for name in config.target_modules:
        try:
            linear = decoder.get_submodule(name)
        except AttributeError:
            linear = None
        if not isinstance(linear, nn.Linear):
            raise CheckpointError(
                f"{path}: {name} is not a linear layer of this model; the adapter is for another "
                "model"
            )
        outs, ins = linear.weight.shape
        for part, shape in (("lora_A", (config.rank, ins)), ("lora_B", (outs, config.rank))):
            tensor = tensors[f"{name}.{part}"]
            if tuple(tensor.shape) != shape:
                raise CheckpointError(
                    f"{path}: {part} of {name} has shape {tuple(tensor.shape)}, expected {shape}; "
                    "the adapter is for another model"
                )
            if not torch.isfinite(tensor).all():
                raise CheckpointError(f"{path}: {part} of {name} has NaN or infinite values")
    add_lora(decoder, config)
    parameters = dict(decoder.named_parameters())
    with torch.no_grad():
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)
    return config


def read_adapter(folder: Path) -> tuple[LoraConfig, dict[str, Tensor]]:
    """Return the adapter's configuration and its tensors by our parameter names.

    The targets in the configuration are dotted layer names. Raises CheckpointError as
    `load_adapter` does.
    """
    with reading(folder, CheckpointError, "give a folder saved by peft"):
        return _read(folder)


def _read(folder: Path) -> tuple[LoraConfig, dict[str, Tensor]]:
    if not folder.is_dir():
        raise CheckpointError(f"adapter folder {folder} does not exist")
    raw = _config(folder / ADAPTER_CONFIG)
    path = folder / ADAPTER_WEIGHTS
    if not path.is_file():
        raise CheckpointError(
            f"{path} does not exist; save the adapter with `save_pretrained`, which writes "
            "safetensors (pickles such as adapter_model.bin can run code when they are opened)"
        )
    try:
        found = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path}: corrupt or cut short ({reason(error)})") from None
    tensors: dict[str, Tensor] = {}
    for key, tensor in found.items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise CheckpointError(f"{path}: tensor {key} is not of a LoRA adapter's linear layers")
        tensors[f"{match[1]}.{match[2]}"] = tensor
    names = sorted({name.rpartition(".")[0] for name in tensors})
    for name in names:
        for part in ("lora_A", "lora_B"):
            if f"{name}.{part}" not in tensors:
                raise CheckpointError(f"{path}: {part} of {name} is missing")
    try:
        rank, alpha = raw["r"], raw["lora_alpha"]
        if type(rank) is not int or isinstance(alpha, bool) or not isinstance(alpha, int | float):
            raise TypeError(f"r={shown(rank)} and lora_alpha={shown(alpha)} must be numbers")
        config = LoraConfig(rank=rank, alpha=float(alpha), target_modules=tuple(names))
    except KeyError as missing:
        raise CheckpointError(f"{folder / ADAPTER_CONFIG}: key {missing} is missing") from None
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{folder / ADAPTER_CONFIG}: {error}") from None
    return config, tensors


def _config(path: Path) -> dict[str, Any]:
    try:
        raw = read_json(path)
    except CheckpointError:
        if path.exists():
            raise
        raise CheckpointError(f"{path} does not exist; give a folder saved by peft") from None
    if raw.get("peft_type") != "LORA":
        kind = shown(raw.get("peft_type"))
        raise CheckpointError(f"{path}: peft_type is {kind}; only adapters of type LORA are read")
    odd = [name for name in _UNKNOWN if raw.get(name)]
    if raw.get("bias", "none") != "none":
        odd.append("bias")
    init = raw.get("init_lora_weights")
    if isinstance(init, str) and init not in _INITS:
        odd.append("init_lora_weights")
    if odd:
        raise CheckpointError(
            f"{path}: {odd[0]}={shown_path(str(raw[odd[0]]))} is not supported; train a plain "
            "LoRA adapter, or merge this one with peft's `merge_and_unload` and start from the "
            "merged model"
        )
    return raw


def _shortest(decoder: Decoder, names: list[str]) -> list[str]:
    """Return the last parts of the names if these match the same layers, else the whole names."""
    short = sorted({name.rpartition(".")[2] for name in names})
    alike = [
        name
        for name, part in decoder.named_modules()
        if name.rpartition(".")[2] in short and (isinstance(part, nn.Linear) or name in names)
    ]
    return short if len(alike) == len(names) else names
