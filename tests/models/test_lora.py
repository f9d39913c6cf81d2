"""LoRA layers: merged weights, initialization, gradients and target names."""

from __future__ import annotations

import math

import pytest
import torch

from slipstream.errors import ConfigError
from slipstream.models import Decoder
from slipstream.models.lora import (
    LoraConfig,
    add_lora,
    base_digest,
    base_weights_only,
    copy_weights,
    lora_layers,
    merged_weights,
    named_weights,
    target_names,
)
from tests.models.helpers import FAMILIES, logits, make_decoder, random_ids


def adapted(
    family: str = "qwen3", *, rank: int = 3, alpha: float = 6.0, seed: int = 5, **more: object
) -> Decoder:
    """Return a decoder whose adapter changes its output."""
    decoder = make_decoder(family, **more)  # type: ignore[arg-type]
    add_lora(decoder, LoraConfig(rank=rank, alpha=alpha), seed=seed)
    fill(decoder, seed)
    return decoder


@torch.no_grad()
def fill(decoder: Decoder, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for layer in lora_layers(decoder).values():
        layer.lora_B.copy_(0.1 * torch.randn(layer.lora_B.shape, generator=generator))


def test_the_merged_weight_equals_the_formula() -> None:
    decoder = make_decoder("llama")
    add_lora(decoder, LoraConfig(rank=2, alpha=3.0, target_modules=("v_proj",)))
    layer = lora_layers(decoder)["model.layers.1.self_attn.v_proj"]
    with torch.no_grad():
        layer.lora_B.normal_(generator=torch.Generator().manual_seed(0))
    a, b = layer.lora_A.tolist(), layer.lora_B.tolist()
    expected = layer.base_weight.double().clone()
    for i in range(expected.shape[0]):
        for j in range(expected.shape[1]):
            for r in range(2):
                expected[i, j] += 1.5 * b[i][r] * a[r][j]
    torch.testing.assert_close(layer.weight.detach().double(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_adapter_keeps_the_output_and_only_it_is_trained(family: str) -> None:
    decoder, ids = make_decoder(family), random_ids(2, 30)
    before = logits(decoder, ids)
    names = [name for name, _ in decoder.named_parameters()]
    add_lora(decoder, LoraConfig(rank=4))
    assert torch.equal(logits(decoder, ids), before)
    assert [name for name, _ in named_weights(decoder)] == names
    trained = [name for name, p in decoder.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 7 * 3
    assert all(name.endswith((".lora_A", ".lora_B")) for name in trained)


def test_a_is_drawn_as_in_peft_and_depends_only_on_the_seed() -> None:
    first, again, other = (
        add_lora(make_decoder("llama"), LoraConfig(rank=8), seed=seed) for seed in (1, 1, 2)
    )
    for name, layer in lora_layers(first).items():
        a = layer.lora_A.detach()
        bound = 1 / math.sqrt(a.shape[1])
        assert 0.9 * bound < float(a.abs().max()) <= bound
        assert not layer.lora_B.any()
        assert torch.equal(a, lora_layers(again)[name].lora_A)
        assert not torch.equal(a, lora_layers(other)[name].lora_A)


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_weights_in_a_plain_decoder_compute_the_same_bits(family: str) -> None:
    decoder, plain = adapted(family), make_decoder(family, seed=9)
    ids = random_ids(2, 40)
    copy_weights(decoder, plain)
    assert torch.equal(logits(plain, ids), logits(decoder, ids))
    own = dict(plain.named_parameters())
    merged = merged_weights(decoder)
    assert merged.keys() == own.keys()
    assert all(torch.equal(own[name], merged[name]) for name in own)
    with torch.no_grad():
        assert not torch.allclose(logits(make_decoder(family), ids), logits(plain, ids), atol=1e-2)


def test_merging_gives_the_same_bits_on_any_number_of_threads() -> None:
    decoder = adapted(rank=16, hidden_size=192, intermediate_size=512, num_layers=1)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(merged_weights(decoder))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_base_weights_only_turns_the_adapter_off_in_its_body() -> None:
    decoder, ids = adapted(), random_ids(1, 20)
    base, with_adapter = logits(make_decoder("qwen3"), ids), logits(decoder, ids)
    name = "model.layers.0.mlp.up_proj.weight"
    merged = merged_weights(decoder)[name]
    with base_weights_only(decoder):
        assert torch.equal(logits(decoder, ids), base)
        # Merged weights for engines do not depend on whether the adapter is on.
        assert torch.equal(merged_weights(decoder)[name], merged)
    assert not torch.equal(merged, merged_weights(make_decoder("qwen3"))[name])
    assert torch.equal(logits(decoder, ids), with_adapter)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_reach_a_and_b_through_the_merged_weight(
    family: str, checkpointing: bool
) -> None:
    """dB = s dW' A^T and dA = s B^T dW', where dW' is the gradient of a plain decoder's weight."""
    decoder, plain = adapted(family, rank=3, alpha=6.0), make_decoder(family)
    copy_weights(decoder, plain)
    ids, positions = random_ids(2, 16), torch.arange(16).expand(2, -1)
    weights = torch.randn(48, generator=torch.Generator().manual_seed(1))
    for model in (decoder, plain):
        hidden = model.pack(torch.float32).forward(ids, positions, recompute=checkpointing).final
        (hidden @ weights).square().mean().backward()  # type: ignore[no-untyped-call]
    dense = {name: p.grad for name, p in plain.named_parameters()}
    for name, layer in lora_layers(decoder).items():
        d = dense[f"{name}.weight"]
        assert d is not None
        assert layer.lora_A.grad is not None
        assert layer.lora_B.grad is not None
        assert float(d.abs().max()) > 0
        torch.testing.assert_close(layer.lora_B.grad, 2 * d @ layer.lora_A.T, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(layer.lora_A.grad, 2 * layer.lora_B.T @ d, atol=1e-5, rtol=1e-4)
    assert decoder.model.embed_tokens.weight.grad is None


@pytest.mark.parametrize(
    ("targets", "excluded", "expected"),
    [
        (("all-linear",), (), 21),
        (("q_proj", "v_proj"), (), 6),
        (("0.self_attn.q_proj",), (), 1),
        (("model.layers.2.mlp.down_proj", "o_proj"), (), 4),
        (("all-linear",), ("down_proj", "1.mlp.up_proj"), 17),
        (("all-linear", "lm_head"), (), 22),
    ],
)
def test_targets_select_the_expected_layers(
    targets: tuple[str, ...], excluded: tuple[str, ...], expected: int
) -> None:
    config = LoraConfig(rank=1, target_modules=targets, exclude_modules=excluded)
    names = target_names(make_decoder("llama"), config)
    assert len(set(names)) == len(names) == expected


def test_the_lm_head_can_have_an_adapter() -> None:
    decoder = make_decoder("llama")
    add_lora(decoder, LoraConfig(rank=2, target_modules=("lm_head",)))
    fill(decoder, 3)
    ids = random_ids(1, 12)
    assert not torch.allclose(logits(decoder, ids), logits(make_decoder("llama"), ids))


def test_the_fingerprint_depends_only_on_the_base_weights() -> None:
    first, second, other = adapted(seed=1), adapted(seed=2), adapted(seed=1)
    with torch.no_grad():
        other.model.norm.weight[0] += 1e-6
    assert base_digest(first) == base_digest(second) != base_digest(other)


def test_a_target_without_a_match_raises_an_error_with_the_existing_names() -> None:
    decoder = make_decoder("llama")
    with pytest.raises(ConfigError, match=r"target_modules=q_prj matches no linear layer.*q_proj"):
        add_lora(decoder, LoraConfig(rank=2, target_modules=("v_proj", "q_prj")))
    with pytest.raises(ConfigError, match="exclude_modules=embed_tokens matches no linear layer"):
        add_lora(decoder, LoraConfig(rank=2, exclude_modules=("embed_tokens",)))
    # A part of a name does not match.
    with pytest.raises(ConfigError, match="target_modules=proj matches"):
        add_lora(decoder, LoraConfig(rank=2, target_modules=("proj",)))
    tied = make_decoder("llama", tie_word_embeddings=True)
    with pytest.raises(ConfigError, match="target_modules=lm_head matches"):
        add_lora(tied, LoraConfig(rank=2, target_modules=("lm_head",)))
    with pytest.raises(ConfigError, match="leaves none"):
        add_lora(
            decoder,
            LoraConfig(rank=2, target_modules=("q_proj",), exclude_modules=("q_proj",)),
        )
    assert all(p.requires_grad for p in decoder.parameters())
    add_lora(decoder, LoraConfig(rank=2))
    with pytest.raises(ConfigError, match="already"):
        add_lora(decoder, LoraConfig(rank=2))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "lora_rank=0 must be at least 1"),
        ({"rank": 2, "alpha": 0.0}, "lora_alpha=0 must be"),
        ({"rank": 2, "alpha": math.inf}, "lora_alpha=inf must be"),
        ({"rank": 2, "target_modules": ()}, "target_modules is empty"),
    ],
)
def test_invalid_lora_settings_raise_an_error(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LoraConfig(**settings)  # type: ignore[arg-type]
