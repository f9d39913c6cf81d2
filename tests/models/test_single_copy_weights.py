"""Single-copy weights: same results as two copies, one allocation, and in-place updates."""

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
    monkeypatch.setattr("slipstream.models.numerics.kernels_supported", lambda: False)


@torch.no_grad()
def states(packed: object) -> torch.Tensor:
    ids = torch.arange(16).view(2, 8) * 3
    return packed.forward(ids, torch.arange(8).expand(2, -1)).final  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_single_copy_weights_compute_the_same_bits_as_two_copies(
    family: str, dtype: torch.dtype
) -> None:
    old, new = make(family, 0), make(family, 1)
    with torch.device("meta"):
        own = Decoder(old.config)
    allocate_single_copy(own, dtype, torch.device("cpu"))
    with torch.no_grad():
        for name, parameter in own.named_parameters():
            parameter.copy_(dict(old.named_parameters())[name])
    packed = pack_in_place(own, dtype)
    with torch.no_grad():
        expected = old.pack(dtype)
    assert torch.equal(states(packed), states(expected))
    assert torch.equal(packed.head[0], expected.head[0])

    # One parameter at a time, as weight updates arrive in buckets.
    for name, parameter in new.named_parameters():
        write(own, packed, {name: parameter.detach()})
    with torch.no_grad():
        expected = new.pack(dtype)
    assert torch.equal(states(packed), states(expected))
    assert torch.equal(packed.head[0], expected.head[0])


def test_packed_weights_share_memory_with_the_parameters() -> None:
    own = make("qwen2", 0)
    packed = pack_in_place(own, torch.bfloat16)
    sizes = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in own.parameters()}
    for layer in packed.layers:
        for linear in (layer.qkv, layer.out, layer.gate_up, layer.down):
            assert linear.weight.untyped_storage().data_ptr() in sizes
    assert packed.embedding.untyped_storage().data_ptr() in sizes
    assert sum(sizes.values()) == 2 * sum(p.numel() for p in own.parameters())


def test_single_copy_weights_raise_an_error_with_compiled_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("slipstream.models.numerics.kernels_supported", lambda: True)
    with pytest.raises(ValueError, match="compiled kernels"):
        pack_in_place(make("qwen3", 0), torch.float32)
