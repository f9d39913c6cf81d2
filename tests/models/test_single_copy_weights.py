from __future__ import annotations

from typing import Any

import pytest
import torch

from slipstream.models import Decoder, ModelConfig
from slipstream.models.single_copy_weights import allocate_single_copy, pack_in_place, write

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"family": "qwen3", "tie_word_embeddings": True},
    "qwen2": {"family": "qwen2", "tie_word_embeddings": False},
}


def make(family: str, seed: int) -> Decoder:
    decoder = Decoder(
        ModelConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            max_position_embeddings=64,
            **FAMILIES[family],
        )
    )
    decoder.init_weights(seed)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.arange(len(parameter)) * (0.01 + seed / 100))
    return decoder


@pytest.fixture(autouse=True)
def _no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.models.numerics.suited", lambda: False)


@torch.no_grad()
def states(packed: object) -> torch.Tensor:
    ids = torch.arange(16).view(2, 8) * 3
    return packed.forward(ids, torch.arange(8).expand(2, -1)).final  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_copy_computes_what_two_do(family: str, dtype: torch.dtype) -> None:
    old, new = make(family, 0), make(family, 1)
    with torch.device("meta"):
        own = Decoder(old.config)
    allocate_single_copy(own, dtype, torch.device("cpu"))
    with torch.no_grad():
        for name, parameter in own.named_parameters():
            parameter.copy_(dict(old.named_parameters())[name])
    packed = pack_in_place(own, dtype)
    with torch.no_grad():
        wanted = old.pack(dtype)
    assert torch.equal(states(packed), states(wanted))
    assert torch.equal(packed.head[0], wanted.head[0])

    # A bucket at a time, as they come.
    for name, parameter in new.named_parameters():
        write(own, packed, {name: parameter.detach()})
    with torch.no_grad():
        wanted = new.pack(dtype)
    assert torch.equal(states(packed), states(wanted))
    assert torch.equal(packed.head[0], wanted.head[0])


def test_there_is_one_copy() -> None:
    own = make("qwen2", 0)
    packed = pack_in_place(own, torch.bfloat16)
    held = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in own.parameters()}
    for layer in packed.layers:
        for linear in (layer.qkv, layer.out, layer.gate_up, layer.down):
            assert linear.weight.untyped_storage().data_ptr() in held
    assert packed.embedding.untyped_storage().data_ptr() in held
    assert sum(held.values()) == 2 * sum(p.numel() for p in own.parameters())


def test_kernels_have_a_layout_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.models.numerics.suited", lambda: True)
    with pytest.raises(ValueError, match="layout of their own"):
        pack_in_place(make("qwen3", 0), torch.float32)
