"""Checkpoint folders that cannot be loaded: the message names the file and the problem."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.errors import CheckpointError, ConfigError
from slipstream.models import ModelConfig, load_checkpoint, save_checkpoint
from slipstream.models.hf_io import INDEX, WEIGHTS, read_tensors
from slipstream.models.policy import load_policy
from tests.models.helpers import FAMILIES, config, make_decoder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_checkpoint(make_decoder("llama"), tmp_path / "m")
    return tmp_path / "m"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_checkpoint(make_decoder("llama"), tmp_path / "s", max_shard_bytes=40_000)
    return tmp_path / "s"


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(folder)
    return str(caught.value)


def test_a_missing_folder_or_file_is_named(folder: Path) -> None:
    assert refused(folder / "no") == f"model folder {folder / 'no'} does not exist"
    with pytest.raises(CheckpointError, match=r"model folder .*no does not exist"):
        read_tensors(folder / "no")
    (folder / WEIGHTS).unlink()
    assert refused(folder) == f"{folder}: neither {WEIGHTS} nor {INDEX} exists"
    (folder / "config.json").unlink()
    assert refused(folder) == f"{folder / 'config.json'} does not exist"


@pytest.mark.parametrize("content", ["{", "", "[1]", '"x"', b"\xff\xfe"])
def test_an_unreadable_config_is_named(folder: Path, content: str | bytes) -> None:
    path = folder / "config.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert refused(folder).startswith(f"{path}: ")


@pytest.mark.parametrize("damage", ["half", "no header", "empty", "bit of the header", "longer"])
def test_damaged_weights_are_named(folder: Path, damage: str) -> None:
    path = folder / WEIGHTS
    data = path.read_bytes()
    damaged = {
        "half": data[: len(data) // 2],
        "no header": data[:5],
        "empty": b"",
        "bit of the header": data[:20] + b"\x00\xff" + data[22:],
        "longer": data + b"xxxx",
    }
    path.write_bytes(damaged[damage])
    assert refused(folder).startswith(f"{path}: corrupt or cut short (")


def test_a_missing_shard_is_named(sharded: Path) -> None:
    first = sorted(sharded.glob("model-*"))[0]
    first.unlink()
    assert refused(sharded) == f"{sharded / INDEX}: names {first.name}, which does not exist"


def test_a_tensor_missing_from_all_shards_is_named(sharded: Path) -> None:
    first = sorted(sharded.glob("model-*"))[0]
    tensors = load_file(first)
    gone = sorted(tensors)[0]
    del tensors[gone]
    save_file(tensors, first)
    assert refused(sharded) == f"{sharded / INDEX}: {gone} is in none of the shards"


@pytest.mark.parametrize("weight_map", [None, {}, [], "x"])
def test_an_index_without_a_weight_map_raises_an_error(sharded: Path, weight_map: object) -> None:
    (sharded / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert refused(sharded).startswith(f"{sharded / INDEX}: weight_map, the shard of each tensor")


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", 3])
def test_an_index_that_names_other_folders_raises_an_error(sharded: Path, name: object) -> None:
    (sharded / INDEX).write_text(json.dumps({"weight_map": {"x": name}}))
    assert f"{name!r} is not the name of a file in this folder" in refused(sharded)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickle_files_raise_an_error(folder: Path, name: str) -> None:
    (folder / WEIGHTS).rename(folder / name)
    message = refused(folder)
    assert message.startswith(f"{folder}: {name} is a pickle file")
    assert "save_pretrained" in message


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NORM), f"tensor {NORM} is missing"),
        (lambda t: t.pop("lm_head.weight"), "tensor lm_head.weight is missing"),
        (lambda t: t.update(extra=torch.ones(1)), "tensor extra is not part of this model"),
        (
            lambda t: t.update({NORM: torch.ones(47)}),
            f"tensor {NORM} has shape (47,), expected (48,)",
        ),
        (lambda t: t[NORM].fill_(float("nan")), f"tensor {NORM} has NaN or infinite values"),
        (lambda t: t[NORM][3:4].fill_(float("inf")), f"tensor {NORM} has NaN or infinite values"),
        (
            lambda t: t.update({NORM: torch.ones(48, dtype=torch.int8)}),
            f"tensor {NORM} has dtype torch.int8, expected a float type",
        ),
        (
            lambda t: t.update({NORM: torch.ones(48).to(torch.float8_e4m3fn)}),
            f"tensor {NORM} has dtype torch.float8_e4m3fn, expected a float type",
        ),
    ],
)
def test_wrong_tensors_are_named(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    edit(folder, change)
    assert refused(folder) == f"{folder}: {message}"


def test_many_problems_are_counted(folder: Path) -> None:
    edit(folder, lambda t: [t.pop(n) for n in list(t) if "layers.1" in n])
    message = refused(folder)
    assert message.count("is missing") == 3
    assert message.endswith("; and 6 more")


def test_a_tied_checkpoint_may_repeat_the_embedding_as_head_but_not_change_it(
    tmp_path: Path,
) -> None:
    decoder = make_decoder("qwen2", tie_word_embeddings=True)
    save_checkpoint(decoder, tmp_path)
    edit(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    load_checkpoint(tmp_path)
    edit(tmp_path, lambda t: t["lm_head.weight"].mul_(2))
    assert refused(tmp_path) == f"{tmp_path}: tensor lm_head.weight is not part of this model"


def test_rotary_frequencies_of_old_files_are_ignored(folder: Path) -> None:
    edit(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": NAN}))
    load_checkpoint(folder)


NAN = torch.full((4,), float("nan"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma2"}, "model_type 'gemma2' is not one that Slipstream's decoder"),
        ({"model_type": None}, "model_type None is not one"),
        ({"rope_scaling": {"rope_type": "yarnn"}}, "RoPE scaling 'yarnn' is not known"),
        ({"rope_parameters": 3}, "rope_parameters must be an object, got 3"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"use_sliding_window": True}, "Llama models have no sliding-window attention"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "for each of 3 layers"),
        ({"attention_bias": True}, "attention_bias=true is not supported for llama"),
        ({"mlp_bias": True}, "mlp_bias=true is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantized checkpoints are not supported"),
        ({"vocab_size": None}, "vocab_size=None must be a whole number from 1"),
        ({"hidden_size": "wide"}, "hidden_size='wide' must be a whole number from 1"),
        ({"num_attention_heads": 0, "head_dim": None}, "num_attention_heads=0 must be a whole"),
        ({"num_key_value_heads": 4}, "num_heads=6 must be a multiple of num_kv_heads=4"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be a whole number from 1"),
        ({"head_dim": 7}, "head_dim=7 must be even"),
    ],
)
def test_unsupported_architectures_raise_an_error(
    folder: Path, change: dict[str, Any], message: str
) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    got = refused(folder)
    assert got.startswith(f"{path}: ")
    assert message in got


SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings",
)  # fmt: skip
ODD = {"text": "48", "list": [48], "object": {}, "huge": 10**12, "digits": 10**400, "negative": -1,
       "fraction": 48.5, "true": True, "NaN": float("nan"), "infinite": float("inf")}  # fmt: skip


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize("odd", ODD)
def test_sizes_that_are_no_sizes_are_named(folder: Path, key: str, odd: str) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: ODD[odd]}))
    message = refused(folder)
    assert message.startswith(f"{path}: {key}=")
    assert "must be a whole number from 1 to" in message
    assert "set it to the value that the model was trained with" in message


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [
        ("rms_norm_eps", "x", "must be a number from 0 to 1"),
        ("rms_norm_eps", float("nan"), "must be a number from 0 to 1"),
        ("rms_norm_eps", -1e-6, "must be a number from 0 to 1"),
        ("initializer_range", [], "must be a number from 0 to 1"),
        ("tie_word_embeddings", "yes", "must be true or false"),
        ("bos_token_id", "a", "must be a token id or null"),
        ("pad_token_id", 10**12, "must be a token id or null"),
        ("eos_token_id", [1, "a"], "must be a token id, a list of token ids, or null"),
        ("eos_token_id", {"a": 1}, "must be a token id or null"),
        ("rope_theta", float("inf"), "must be a finite number"),
    ],
)
def test_odd_values_of_other_fields_are_named(
    folder: Path, key: str, value: object, part: str
) -> None:
    path = folder / "config.json"
    (folder / "generation_config.json").unlink()
    raw = {**json.loads(path.read_text()), "rope_parameters": None, key: value}
    path.write_text(json.dumps(raw))
    message = refused(folder)
    assert message.startswith(f"{path}: {key}=")
    assert part in message


def test_sizes_beyond_the_weights_are_refused_before_memory_is_taken(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": 2**31 - 1}))
    message = refused(folder)
    assert "vocab_size=2147483647" in message
    assert f"but the weights have {(folder / WEIGHTS).stat().st_size:,} bytes" in message


def test_odd_end_tokens_of_the_generation_config_name_that_file(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": ["a"]}')
    assert refused(folder).startswith(f"{folder / 'generation_config.json'}: eos_token_id=['a']")


@pytest.mark.parametrize("content", ["[" * 5000, '{"a": ' + "9" * 6000 + "}"])
def test_a_config_that_no_parser_reads_is_named(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    message = refused(folder)
    assert message.startswith(f"{folder / 'config.json'}: ")
    assert message.endswith("give a folder as save_pretrained writes it")


@pytest.mark.parametrize("name", ["config.json", WEIGHTS])
def test_pipes_and_devices_are_refused_without_waiting(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert refused(folder).startswith(f"{folder / name} is not a regular file")
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")
    assert refused(folder).startswith(f"{folder / name} is not a regular file")


@pytest.mark.parametrize("key", ["num_hidden_layers", "vocab_size"])
def test_a_policy_of_transformers_with_endless_sizes_is_refused(folder: Path, key: str) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: 10**12}))
    with pytest.raises(
        CheckpointError, match=rf"config\.json: {key}=1000000000000 must be at most"
    ):
        load_policy(folder, "transformers")


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "rms_norm_eps"])
def test_missing_config_keys_are_named(folder: Path, key: str) -> None:
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    del raw[key]
    path.write_text(json.dumps(raw))
    assert refused(folder).startswith(f"{path}: key '{key}' is missing; set it")


def test_invalid_settings_of_a_new_model_are_config_errors() -> None:
    with pytest.raises(ConfigError, match="unknown model family 'gpt2'; known: qwen2"):
        config("gpt2")
    with pytest.raises(ConfigError, match="hidden_size=0 must be at least 1"):
        config("qwen2", hidden_size=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_configs_survive_a_round_trip(family: str) -> None:
    original = config(family, eos_token_id=(3, 4), pad_token_id=0, initializer_range=0.01)
    assert ModelConfig.from_hf(original.to_hf(), source="x") == original
