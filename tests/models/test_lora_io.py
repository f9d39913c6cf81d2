"""LoRA adapters as files: agreement with peft in both directions, and error messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.errors import CheckpointError, ConfigError
from slipstream.models import Decoder, load_checkpoint, save_checkpoint
from slipstream.models.lora import LoraConfig, add_lora, lora_layers
from slipstream.models.lora_io import ADAPTER_CONFIG, ADAPTER_WEIGHTS, load_adapter, save_adapter
from tests.models.helpers import (
    FAMILIES,
    load_theirs,
    logits,
    make_decoder,
    random_ids,
    their_logits,
)
from tests.models.test_lora import adapted, fill


def with_peft(base: Path, adapter: Path) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(load_theirs(base), str(adapter)).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_peft_loads_our_adapter(family: str, tmp_path: Path) -> None:
    decoder = adapted(family, rank=4, alpha=10.0)
    save_checkpoint(make_decoder(family), tmp_path / "base")
    save_adapter(decoder, tmp_path / "adapter", base_model="base")
    ids = random_ids(2, 50)
    ours = logits(decoder, ids)
    theirs = their_logits(with_peft(tmp_path / "base", tmp_path / "adapter"), ids)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert float((ours - logits(make_decoder(family), ids)).abs().max()) > 0.05


def test_transformers_loads_our_merged_checkpoint(tmp_path: Path) -> None:
    decoder, ids = adapted("qwen3"), random_ids(2, 50)
    save_checkpoint(decoder, tmp_path)
    torch.testing.assert_close(
        logits(decoder, ids), their_logits(load_theirs(tmp_path), ids), atol=1e-5, rtol=1e-5
    )
    assert torch.equal(logits(load_checkpoint(tmp_path), ids), logits(decoder, ids))


@pytest.mark.parametrize("family", FAMILIES)
def test_we_load_an_adapter_of_peft(family: str, tmp_path: Path) -> None:
    from peft import LoraConfig as TheirConfig
    from peft import get_peft_model

    save_checkpoint(make_decoder(family), tmp_path / "base")
    model = get_peft_model(
        load_theirs(tmp_path / "base"),
        TheirConfig(
            r=3,
            lora_alpha=7,
            lora_dropout=0.1,
            target_modules=["q_proj", "down_proj"],
            task_type="CAUSAL_LM",
        ),
    ).eval()
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(str(tmp_path / "adapter"))
    decoder = load_checkpoint(tmp_path / "base")
    config = load_adapter(decoder, tmp_path / "adapter")
    assert (config.rank, config.alpha, len(config.target_modules)) == (3, 7.0, 6)
    ids = random_ids(2, 50)
    torch.testing.assert_close(logits(decoder, ids), their_logits(model, ids), atol=1e-5, rtol=1e-5)
    assert sum(p.requires_grad for p in decoder.parameters()) == 12


@pytest.mark.parametrize(
    ("targets", "written"),
    [
        (("all-linear",), 7),
        (("q_proj", "up_proj"), 2),
        (("0.self_attn.q_proj", "2.self_attn.q_proj"), 2),
    ],
)
def test_a_round_trip_keeps_all_bits_and_target_layers(
    targets: tuple[str, ...], written: int, tmp_path: Path
) -> None:
    decoder = make_decoder("qwen2")
    add_lora(decoder, LoraConfig(rank=2, alpha=0.5, target_modules=targets))
    fill(decoder, 4)
    save_adapter(decoder, tmp_path / "adapter")
    raw = json.loads((tmp_path / "adapter" / ADAPTER_CONFIG).read_text())
    assert (raw["r"], raw["lora_alpha"], len(raw["target_modules"])) == (2, 0.5, written)
    again = make_decoder("qwen2")
    load_adapter(again, tmp_path / "adapter")
    assert lora_layers(again).keys() == lora_layers(decoder).keys()
    ids = random_ids(1, 20)
    assert torch.equal(logits(again, ids), logits(decoder, ids))
    save_checkpoint(make_decoder("qwen2"), tmp_path / "base")
    theirs = their_logits(with_peft(tmp_path / "base", tmp_path / "adapter"), ids)
    torch.testing.assert_close(logits(again, ids), theirs, atol=1e-5, rtol=1e-5)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    save_adapter(adapted("llama"), tmp_path / "adapter")
    return tmp_path / "adapter"


def refused(adapter: Path, message: str, decoder: Decoder | None = None) -> None:
    decoder = decoder or make_decoder("llama")
    with pytest.raises(CheckpointError, match=message):
        load_adapter(decoder, adapter)
    assert not lora_layers(decoder)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("peft_type", "IA3", "peft_type is 'IA3'"),
        ("use_dora", True, "use_dora=True is not supported"),
        ("use_rslora", True, "use_rslora=True is not supported"),
        ("modules_to_save", ["lm_head"], "modules_to_save"),
        ("rank_pattern", {"q_proj": 2}, "rank_pattern"),
        ("bias", "all", "bias=all is not supported"),
        ("init_lora_weights", "pissa_niter_4", "init_lora_weights=pissa_niter_4 is not supported"),
        ("r", 5, "expected"),
        ("r", 0, "lora_rank=0 must be at least 1"),
        ("lora_alpha", "x", "lora_alpha='x' must be numbers"),
        ("r", None, "key 'r' is missing"),
    ],
)
def test_unsupported_adapter_configurations_raise_an_error(
    key: str, value: object, message: str, adapter: Path
) -> None:
    raw = json.loads((adapter / ADAPTER_CONFIG).read_text())
    raw[key] = value
    if value is None:
        del raw[key]
    (adapter / ADAPTER_CONFIG).write_text(json.dumps(raw))
    refused(adapter, message)


def test_broken_adapter_files_raise_an_error(adapter: Path, tmp_path: Path) -> None:
    weights, raw = adapter / ADAPTER_WEIGHTS, (adapter / ADAPTER_CONFIG).read_text()
    refused(adapter, "is for another model", make_decoder("llama", num_layers=2))
    refused(adapter, "has shape", make_decoder("llama", intermediate_size=96))
    tensors = load_file(weights)
    name = sorted(tensors)[0]
    broken = {**tensors, name: torch.full_like(tensors[name], float("nan"))}
    save_file(broken, weights)
    refused(adapter, "NaN or infinite")
    save_file({n: t for n, t in tensors.items() if n != name}, weights)
    refused(adapter, "is missing")
    save_file({**tensors, "base_model.model.lm_head.weight": tensors[name].clone()}, weights)
    refused(adapter, "lm_head.weight is not of a LoRA adapter")
    weights.write_bytes(b"no safetensors")
    refused(adapter, "corrupt or cut short")
    weights.rename(adapter / "adapter_model.bin")
    refused(adapter, "pickles")
    (adapter / ADAPTER_CONFIG).write_text(raw[:20])
    refused(adapter, "not readable as JSON")
    (adapter / ADAPTER_CONFIG).unlink()
    refused(adapter, "does not exist")
    refused(tmp_path / "nowhere", "does not exist")


def test_saving_a_model_without_adapter_raises_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no LoRA adapter"):
        save_adapter(make_decoder("llama"), tmp_path)
