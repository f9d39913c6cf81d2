"""Read and write Hugging Face checkpoint folders: config.json, safetensors, generation config.

This module knows nothing about training state (that is `slipstream.checkpoint`). It refuses pickle
files, because they can run code when they are opened.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from slipstream.errors import CheckpointError
from slipstream.models.config import ModelConfig, read_tokens
from slipstream.models.decoder import Decoder, without_init
from slipstream.models.draft.model import DraftModel
from slipstream.models.lora import named_weights, value_of
from slipstream.models.sharded import assign, full
from slipstream.reading import reading, reason, shown

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5_000_000_000
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_SAVED = "give a folder as save_pretrained writes it"
_MOST_JSON_BYTES = 200_000_000
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def load_config(folder: Path, *, positions: int | None = None) -> ModelConfig:
    """Return the architecture in `folder/config.json`.

    `positions` replaces its `max_position_embeddings`.

    End-of-sequence ids come from `generation_config.json` if it has some, as in transformers'
    `generate`. Chat models also list the end-of-turn token there. Raises CheckpointError, which
    names the file.
    """
    path, generation = folder / "config.json", folder / "generation_config.json"
    with reading(path, CheckpointError, _SAVED):
        if not folder.is_dir():
            raise CheckpointError(f"model folder {folder} does not exist")
        raw = read_json(path)
        if generation.exists():
            own = read_json(generation)
            if own.get("eos_token_id") is not None:
                raw = {**raw, "eos_token_id": read_tokens(own, "eos_token_id", str(generation))}
        if positions is not None:
            raw = {**raw, "max_position_embeddings": positions}
        return ModelConfig.from_hf(raw, source=str(path))


def load_checkpoint(
    folder: Path, *, device: torch.device | None = None, positions: int | None = None
) -> Decoder:
    """Return a decoder with fp32 parameters from a Hugging Face folder.

    `positions` replaces the `max_position_embeddings` of its config.json.

    Raises CheckpointError for missing or corrupt files, for pickle files, for missing, unexpected
    or misshapen tensors, and for NaN or infinite values. The error names the file and the problem.
    """
    config = load_config(folder, positions=positions)
    check_bytes(config, folder)
    with without_init():
        decoder = Decoder(config)
    load_tensors(decoder, read_tensors(folder), source=str(folder))
    return decoder.to(device) if device is not None else decoder


def map_checkpoint(folder: Path, *, positions: int | None = None) -> Decoder:
    """Return a decoder on the CPU whose parameters are the tensors in a Hugging Face folder's
    files.

    They have the dtype of the file and are mapped, not copied: a page of the file is read when it
    is first used. So this is for a policy that is not trained, and the files must not be rewritten
    while the decoder exists. `pack` returns the same weights as after `load_checkpoint`.
    `positions` and errors are as in `load_checkpoint`.
    """
    config = load_config(folder, positions=positions)
    check_bytes(config, folder)
    with torch.device("meta"), without_init():
        decoder = Decoder(config)
    tensors = read_tensors(folder)
    _refuse(tensor_problems(decoder, tensors), str(folder))
    # Rounded to fp32 as in `load_checkpoint`: rounding fp64 to bf16 directly may differ.
    own = {
        name: tensors[name].float() if tensors[name].dtype == torch.float64 else tensors[name]
        for name, _ in decoder.named_parameters()
    }
    decoder.load_state_dict(own, assign=True)
    return decoder


def check_bytes(config: ModelConfig, folder: Path) -> None:
    """Raise CheckpointError if the weights have fewer bytes than the model has parameters.

    Otherwise wrong sizes in `config.json` would fill the memory before a tensor is compared.
    """
    files = [folder / WEIGHTS] if (folder / WEIGHTS).exists() else folder.glob("*.safetensors")
    stored = stored_bytes(files)
    needed = config.parameters
    if stored and needed > stored:
        raise CheckpointError(
            f"{folder}: config.json describes a model with {needed:,} parameters (vocab_size="
            f"{config.vocab_size}, hidden_size={config.hidden_size}, intermediate_size="
            f"{config.intermediate_size}, num_hidden_layers={config.num_layers}), but the weights "
            f"have {stored:,} bytes; give the config.json of these weights, and all of their files"
        )


def stored_bytes(files: Iterable[Path]) -> int:
    """Return the bytes of safetensors files; 0 if one of them cannot be opened.

    Reading that file gives the better error.
    """
    stored = 0
    for file in files:
        if not file.is_file():
            return 0
        try:
            with safe_open(file, framework="pt"):
                stored += file.stat().st_size
        except (SafetensorError, OSError, ValueError):
            return 0
    return stored


def read_tensors(folder: Path) -> Mapping[str, Tensor]:
    """Return all tensors of a checkpoint folder by name. Raises CheckpointError."""
    return dict(each_tensor(folder))


def each_tensor(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a checkpoint folder one at a time, from one file or from its shards.

    If both exist, the single file is read, as in transformers. Raises CheckpointError.
    """
    with reading(folder, CheckpointError, _SAVED):
        yield from _each_tensor(folder)


def _each_tensor(folder: Path) -> Iterator[tuple[str, Tensor]]:
    if not folder.is_dir():
        raise CheckpointError(f"model folder {folder} does not exist")
    index = folder / INDEX
    if (folder / WEIGHTS).exists():
        names, files = {}, [folder / WEIGHTS]
    elif index.exists():
        names = _weight_map(index)
        files = sorted({folder / file for file in names.values()})
    else:
        pickles = [p.name for p in sorted(folder.glob("*")) if p.suffix in (".bin", ".pt", ".pth")]
        if pickles:
            raise CheckpointError(
                f"{folder}: {pickles[0]} is a pickle file, which can run code when it is opened; "
                "convert it with `AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)`"
            )
        raise CheckpointError(f"{folder}: neither {WEIGHTS} nor {INDEX} exists")
    absent = set(names)
    for file in files:
        if not file.exists():
            raise CheckpointError(f"{index}: names {file.name}, which does not exist")
        check_regular(file)
        for name, tensor in _read_safetensors(file):
            absent.discard(name)
            yield name, tensor
    if absent:
        raise CheckpointError(f"{index}: {min(absent)} is in none of the shards")


def _weight_map(index: Path) -> dict[str, str]:
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise CheckpointError(f"{index}: weight_map, the shard of each tensor, is missing")
    for file in names.values():
        if not isinstance(file, str) or Path(file).name != file or "\0" in file or len(file) > 255:
            raise CheckpointError(
                f"{index}: {shown(file)} is not the name of a file in this folder"
            )
    return names


def load_sharded_weights(decoder: Decoder, folder: Path) -> None:
    """Copy the tensors of a checkpoint into a sharded decoder.

    Every process reads the files, one tensor at a time. Raises CheckpointError; by then some
    tensors may have been copied.
    """
    parameters = dict(decoder.named_parameters())
    missing, tied_copies = set(parameters), dict[str, Tensor]()
    for name, tensor in each_tensor(folder):
        if name == _HEAD and name not in parameters:
            tied_copies[name] = tensor
            continue
        if name in parameters or not _is_redundant(name, {}, decoder.config):
            _refuse(tensor_problems(decoder, {name: tensor}, some=True), str(folder))
            assign(parameters[name], tensor)
            missing.discard(name)
    _refuse([f"tensor {name} is missing" for name in sorted(missing)], str(folder))
    if tied_copies:
        tied_copies[_EMBEDDING] = full(parameters[_EMBEDDING].detach()).cpu()
        _refuse(tensor_problems(decoder, tied_copies, some=True), str(folder))


def _refuse(problems: Sequence[str], source: str) -> None:
    """Raise CheckpointError with the first problems, if there are any."""
    if problems:
        shown = "; ".join(problems[:3])
        more = f"; and {len(problems) - 3} more" if problems[3:] else ""
        raise CheckpointError(f"{source}: {shown}{more}")


def load_tensors(
    decoder: Decoder | DraftModel, tensors: Mapping[str, Tensor], *, source: str
) -> None:
    """Copy `tensors` (Hugging Face names) into `decoder`.

    All tensors are checked before any weight changes. Raises CheckpointError.
    """
    _refuse(tensor_problems(decoder, tensors), source)
    copy_tensors(decoder, tensors)


@torch.no_grad()
def copy_tensors(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors that `tensor_problems` has accepted into `module`."""
    for name, parameter in module.named_parameters():
        assign(parameter, tensors[name])


def tensor_problems(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype = torch.float32,
    *,
    some: bool = False,
) -> list[str]:
    """Return the reasons why `tensors` do not fit `module`; empty if they fit.

    With `some`, they may be a part of its weights. `dtype` is the compute dtype, into whose range
    the values must fit.
    """
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    problems = []
    if not some:
        problems += [f"tensor {name} is missing" for name in shapes if name not in tensors]
    for name, tensor in tensors.items():
        if name not in shapes:
            if not (isinstance(module, Decoder) and _is_redundant(name, tensors, module.config)):
                problems.append(f"tensor {name} is not part of this model")
        elif tuple(tensor.shape) != shapes[name]:
            problems.append(
                f"tensor {name} has shape {tuple(tensor.shape)}, expected {shapes[name]}"
            )
        elif tensor.dtype not in _DTYPES:
            problems.append(f"tensor {name} has dtype {tensor.dtype}, expected a float type")
        elif tensor.numel():
            # One pass is enough: a NaN or infinite value makes the minimum or maximum so.
            extremes = torch.stack(torch.aminmax(tensor.detach()))
            if not torch.isfinite(extremes).all():
                problems.append(f"tensor {name} has NaN or infinite values")
            elif not torch.isfinite(extremes.to(dtype)).all():
                short = str(dtype).removeprefix("torch.")
                problems.append(f"tensor {name} has values beyond the range of {short}")
    return problems


def _is_redundant(name: str, tensors: Mapping[str, Tensor], config: ModelConfig) -> bool:
    """Return whether a tensor holds nothing beyond the parameters.

    A tied checkpoint may store the LM head a second time. An old one may store rotary frequencies.
    """
    if name.endswith("rotary_emb.inv_freq"):
        return True
    if name != _HEAD or not config.tie_word_embeddings:
        return False
    embedding = tensors.get(_EMBEDDING)
    return embedding is not None and torch.equal(tensors[name], embedding)


def save_checkpoint(
    decoder: Decoder,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    generation: Mapping[str, Any] | None = None,
    save_tokenizer: Callable[[str], object] | None = None,
) -> None:
    """Write a folder that `AutoModelForCausalLM.from_pretrained` loads.

    Existing files are overwritten. `generation` becomes `generation_config.json` (sampling
    defaults). `save_tokenizer` is a tokenizer's `save_pretrained`.
    """
    name = str(dtype).removeprefix("torch.")
    write_model(
        folder, decoder.config.to_hf(dtype=name), decoder, dtype=dtype, max_bytes=max_shard_bytes
    )
    c = decoder.config
    eos = list(c.eos_token_id) if isinstance(c.eos_token_id, tuple) else c.eos_token_id
    defaults = {"bos_token_id": c.bos_token_id, "eos_token_id": eos, "pad_token_id": c.pad_token_id}
    _write_json(folder / "generation_config.json", {**defaults, **(generation or {})})
    if save_tokenizer is not None:
        save_tokenizer(str(folder))


def write_model(
    folder: Path,
    config: Mapping[str, Any],
    module: nn.Module,
    *,
    dtype: torch.dtype,
    max_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write `config.json` and the weights of `module` into `folder`.

    A LoRA adapter is merged into the weights. Existing files are overwritten.
    """
    # One weight at a time: all merged or gathered weights might not fit in addition to the model.
    tensors = {name: value_of(w).to("cpu", dtype) for name, w in named_weights(module)}
    write_tensors(folder, config, tensors, dtype=dtype, max_bytes=max_bytes)


def write_tensors(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
    max_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write `config.json` and `tensors` into `folder`.

    Floating-point tensors are stored as `dtype`. Existing files are overwritten.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config)
    tensors = {
        name: tensor.to("cpu", dtype if tensor.is_floating_point() else tensor.dtype).contiguous()
        for name, tensor in tensors.items()
    }
    for stale in (folder / INDEX, folder / WEIGHTS, *folder.glob("model-*-of-*.safetensors")):
        # Shards of an earlier save must not be read as part of this one.
        stale.unlink(missing_ok=True)
    _write_shards(tensors, folder, max_bytes)


def _write_shards(tensors: Mapping[str, Tensor], folder: Path, max_bytes: int) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if size and size + tensor.nbytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / WEIGHTS, metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    total = sum(t.nbytes for t in tensors.values())
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _read_safetensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    remedy = "give a safetensors file as save_pretrained writes it"
    with reading(file, CheckpointError, remedy):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    yield name, cast(Tensor, opened.get_tensor(name))
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(
                f"{file}: corrupt or cut short ({reason(error)}); {remedy}"
            ) from None


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises CheckpointError, which names the file."""
    with reading(path, CheckpointError, _SAVED):
        if not path.exists():
            raise CheckpointError(f"{path} does not exist")
        check_regular(path)
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path}: not readable as JSON ({reason(error)}); {_SAVED}"
            ) from None
        if not isinstance(value, dict):
            raise CheckpointError(f"{path}: expected a JSON object; {_SAVED}")
        return value


def check_regular(path: Path) -> None:
    """Raise CheckpointError if a file is no regular file, or longer than any of its kind.

    Reading a pipe waits for its writer, and reading a device may never end.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is not a regular file; {_SAVED}")
    if path.suffix == ".json" and path.stat().st_size > _MOST_JSON_BYTES:
        raise CheckpointError(f"{path} has more than {_MOST_JSON_BYTES:,} bytes; {_SAVED}")


def architectures(folder: Path) -> list[str]:
    """Return the architecture names in `folder/config.json`. Raises CheckpointError."""
    path = folder / "config.json"
    names = read_json(path).get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(
            f"{path}: architectures={shown(names)} must be a list of names; {_SAVED}"
        )
    return names


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
