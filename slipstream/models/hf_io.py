"""Hugging Face checkpoint folders: config.json, (sharded) safetensors, generation config.

Reads and writes files; knows nothing about training state (that is `checkpoint`). Pickle files are
refused: they run code when they are opened.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from slipstream.errors import CheckpointError
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Decoder
from slipstream.models.draft.model import DraftModel
from slipstream.models.lora import named_weights, value_of
from slipstream.models.sharded import assign, full

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5_000_000_000
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def load_config(folder: Path) -> ModelConfig:
    """The architecture in `folder/config.json`. Raises CheckpointError naming the file.

    End-of-sequence ids come from `generation_config.json` where it names some, as in transformers'
    `generate`: chat models list there the end of a turn, too.
    """
    if not folder.is_dir():
        raise CheckpointError(f"model folder {folder} does not exist")
    path, generation = folder / "config.json", folder / "generation_config.json"
    raw = read_json(path)
    if generation.exists():
        eos = read_json(generation).get("eos_token_id")
        raw = raw if eos is None else {**raw, "eos_token_id": eos}
    return ModelConfig.from_hf(raw, source=str(path))


def load_checkpoint(folder: Path, *, device: torch.device | None = None) -> Decoder:
    """A decoder with fp32 parameters from a Hugging Face folder.

    Raises CheckpointError naming the file and what is wrong: missing or corrupt files, pickles,
    missing, extra or misshapen tensors, NaN or infinite values.
    """
    config = load_config(folder)
    decoder = Decoder(config)
    load_tensors(decoder, read_tensors(folder), source=str(folder))
    return decoder.to(device) if device is not None else decoder


def read_tensors(folder: Path) -> Mapping[str, Tensor]:
    """All tensors of a checkpoint folder. Raises CheckpointError."""
    return dict(each_tensor(folder))


def each_tensor(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a checkpoint folder, one after the other, from one file or from the shards its
    index names.

    The single file is preferred where both are there, as in transformers. Raises CheckpointError.
    """
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
        raise CheckpointError(f"{folder}: neither {WEIGHTS} nor {INDEX} is there")
    absent = set(names)
    for file in files:
        if not file.exists():
            raise CheckpointError(f"{index}: names {file.name}, which is not there")
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
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{index}: {file!r} is not the name of a file in this folder")
    return names


def load_spread(decoder: Decoder, folder: Path) -> None:
    """Copy the tensors of a checkpoint into a decoder that is spread over processes, each of which
    reads them by itself, one at a time. Raises CheckpointError, when some are there already."""
    parameters = dict(decoder.named_parameters())
    missing, again = set(parameters), dict[str, Tensor]()
    for name, tensor in each_tensor(folder):
        if name == _HEAD and name not in parameters:
            again[name] = tensor
            continue
        if name in parameters or not _is_redundant(name, {}, decoder.config):
            _refuse(tensor_problems(decoder, {name: tensor}, some=True), str(folder))
            assign(parameters[name], tensor)
            missing.discard(name)
    _refuse([f"tensor {name} is missing" for name in sorted(missing)], str(folder))
    if again:
        again[_EMBEDDING] = full(parameters[_EMBEDDING].detach()).cpu()
        _refuse(tensor_problems(decoder, again, some=True), str(folder))


def _refuse(problems: Sequence[str], source: str) -> None:
    """Raise CheckpointError where there are any."""
    if problems:
        shown = "; ".join(problems[:3])
        more = f"; and {len(problems) - 3} more" if problems[3:] else ""
        raise CheckpointError(f"{source}: {shown}{more}")


def load_tensors(
    decoder: Decoder | DraftModel, tensors: Mapping[str, Tensor], *, source: str
) -> None:
    """Copy `tensors` (Hugging Face names) into `decoder`; all are checked before any is changed."""
    _refuse(tensor_problems(decoder, tensors), source)
    copy_tensors(decoder, tensors)


@torch.no_grad()
def copy_tensors(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors in which `tensor_problems` found none."""
    for name, parameter in module.named_parameters():
        assign(parameter, tensors[name])


def tensor_problems(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype = torch.float32,
    *,
    some: bool = False,
) -> list[str]:
    """What keeps `tensors` from being the weights of `module`, or `some` of them, computing in
    `dtype`: empty when nothing does."""
    wanted = {name: tuple(p.shape) for name, p in module.named_parameters()}
    problems = []
    if not some:
        problems += [f"tensor {name} is missing" for name in wanted if name not in tensors]
    for name, tensor in tensors.items():
        if name not in wanted:
            if not (isinstance(module, Decoder) and _is_redundant(name, tensors, module.config)):
                problems.append(f"tensor {name} is not part of this model")
        elif tuple(tensor.shape) != wanted[name]:
            problems.append(
                f"tensor {name} has shape {tuple(tensor.shape)}, expected {wanted[name]}"
            )
        elif tensor.dtype not in _DTYPES:
            problems.append(f"tensor {name} has dtype {tensor.dtype}, expected a float type")
        elif tensor.numel():
            # One pass over them: what is not finite is the least or the largest, or makes them so.
            ends = torch.stack(torch.aminmax(tensor.detach()))
            if not torch.isfinite(ends).all():
                problems.append(f"tensor {name} has NaN or infinite values")
            elif not torch.isfinite(ends.to(dtype)).all():
                short = str(dtype).removeprefix("torch.")
                problems.append(f"tensor {name} has values beyond the range of {short}")
    return problems


def _is_redundant(name: str, tensors: Mapping[str, Tensor], config: ModelConfig) -> bool:
    """Whether a tensor says nothing that the parameters do not say.

    A tied checkpoint may carry the head a second time, an old one its rotary frequencies.
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
    """Write a folder that `AutoModelForCausalLM.from_pretrained` loads, over what it holds.

    `generation` becomes `generation_config.json` (sampling defaults). `save_tokenizer` is a
    tokenizer's `save_pretrained`.
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
    """Write `config.json` and the weights of `module`, merged where it has an adapter, over what
    `folder` holds."""
    # One after the other: merged or gathered, all together might not fit beside the model.
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
    """Write `config.json` and `tensors`, those of floating-point numbers as `dtype`, over what
    `folder` holds."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config)
    tensors = {
        name: tensor.to("cpu", dtype if tensor.is_floating_point() else tensor.dtype).contiguous()
        for name, tensor in tensors.items()
    }
    for stale in (folder / INDEX, folder / WEIGHTS, *folder.glob("model-*-of-*.safetensors")):
        # Weights of an earlier save, cut into other files, must not be read as part of this one.
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
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        where.update(dict.fromkeys(shard, file))
    total = sum(t.nbytes for t in tensors.values())
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})


def _read_safetensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                yield name, cast(Tensor, opened.get_tensor(name))
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{file}: corrupt or cut short ({error})") from None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises CheckpointError naming it."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return value


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
