"""RoPE scaling: agreement with transformers, both key names in files, and invalid settings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.errors import CheckpointError, ConfigError
from slipstream.models import Decoder, ModelConfig, save_checkpoint
from slipstream.models.attention import SCORE_BOUND
from slipstream.models.functional import rope_table
from slipstream.models.hf_io import load_config
from slipstream.models.rope_frequencies import inverse_frequencies
from slipstream.models.rope_scaling import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    YarnScaling,
)
from tests.models.helpers import (
    FAMILIES,
    config,
    load_theirs,
    logits,
    make_decoder,
    random_ids,
    their_logits,
)

ORIGINAL = 64
SCALINGS: dict[str, RopeScaling] = {
    "linear": LinearScaling(factor=3.0),
    "dynamic": DynamicScaling(factor=2.5),
    "llama3": Llama3Scaling(
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=ORIGINAL,
    ),
    "yarn": YarnScaling(factor=4.0, original_max_position_embeddings=ORIGINAL),
    "yarn sharpness given": YarnScaling(
        factor=4.0, original_max_position_embeddings=ORIGINAL, attention_factor=0.8
    ),
    "yarn every setting": YarnScaling(
        factor=4.0,
        original_max_position_embeddings=ORIGINAL,
        mscale=1.2,
        mscale_all_dim=0.7,
        beta_fast=20.0,
        beta_slow=2.0,
        truncate=False,
    ),
    "longrope": LongRopeScaling(
        short_factor=(1.0, 1.1, 1.5, 2.0),
        long_factor=(1.0, 2.0, 4.0, 8.0),
        original_max_position_embeddings=ORIGINAL,
        factor=4.0,
    ),
    "longrope sharpness given": LongRopeScaling(
        short_factor=(1.0, 1.1, 1.5, 2.0),
        long_factor=(1.0, 2.0, 4.0, 8.0),
        original_max_position_embeddings=ORIGINAL,
        factor=4.0,
        attention_factor=1.3,
    ),
}


def scaled(name: str, family: str = "llama") -> Decoder:
    return make_decoder(family, head_dim=8, rope_scaling=SCALINGS[name])


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_match_transformers(family: str, name: str, tmp_path: Path) -> None:
    decoder = scaled(name, family)
    save_checkpoint(decoder, tmp_path)
    model = load_theirs(tmp_path)
    # Within the original length, at its end, one beyond, and at the end of all positions.
    lengths = [n for n in (8, 64, 65, 256) if n <= decoder.config.context_limit.tokens]
    assert len(lengths) == (2 if "longrope" in name else 4)
    for length in lengths:
        ids = random_ids(2, length)
        ours, theirs = logits(decoder, ids), their_logits(model, ids)
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)
    plain = Decoder(replace(decoder.config, rope_scaling=None))
    plain.load_state_dict(decoder.state_dict())
    same = torch.allclose(logits(plain, ids), ours, atol=1e-3)
    assert same == (name == "dynamic")


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("theta", [5000.0, 500000.0])
@pytest.mark.parametrize("head_dim", [8, 128])
def test_rotations_equal_those_of_transformers_bit_for_bit(
    name: str, theta: float, head_dim: int, tmp_path: Path
) -> None:
    scaling = SCALINGS[name]
    if isinstance(scaling, LongRopeScaling):
        wide = tuple(1 + i / 7 for i in range(head_dim // 2))
        scaling = replace(scaling, short_factor=wide, long_factor=wide)
    c = config("llama", head_dim=head_dim, rope_theta=theta, rope_scaling=scaling, num_layers=1)
    save_checkpoint(Decoder(c), tmp_path)
    rotary = load_theirs(tmp_path).model.rotary_emb
    assert torch.equal(inverse_frequencies(theta, head_dim, scaling), rotary.inv_freq)
    positions = torch.arange(c.context_limit.tokens)[None]
    cos, sin = rotary(torch.ones(1), positions)
    our_cos, our_sin = (
        part[: positions.shape[1]] for part in rope_table(c, torch.float32, positions.device)
    )
    assert torch.equal(our_cos, cos[0])
    half = head_dim // 2
    assert torch.equal(our_sin[:, half:], sin[0, :, half:])
    assert torch.equal(our_sin[:, :half], -sin[0, :, :half])


def test_gradients_match_transformers(tmp_path: Path) -> None:
    """The kernels' backward pass includes the magnitude of cosines and sines."""
    decoder = scaled("yarn", "qwen3")
    save_checkpoint(decoder, tmp_path)
    model = load_theirs(tmp_path)
    ids = random_ids(1, 100)
    weights = torch.randn(1, 100, decoder.config.vocab_size)
    packed = decoder.pack(torch.float32)
    hidden = packed.forward(ids, torch.arange(100)[None]).final
    (packed.lm_head(hidden) * weights).sum().backward()  # type: ignore[no-untyped-call]
    (model(input_ids=ids).logits * weights).sum().backward()
    theirs = dict(model.named_parameters())
    for name, parameter in decoder.named_parameters():
        assert parameter.grad is not None
        assert float(parameter.grad.abs().max()) > 0, name
        torch.testing.assert_close(parameter.grad, theirs[name].grad, atol=2e-3, rtol=1e-3)


def test_a_rope_magnitude_above_one_counts_in_the_score_bound() -> None:
    c = config("qwen3", head_dim=64)
    decoder = Decoder(c)
    gain = (SCORE_BOUND / 64**0.5) ** 0.5 * 0.99
    with torch.no_grad():
        for layer in decoder.model.layers:
            layer.self_attn.q_norm.weight.fill_(gain)  # type: ignore[union-attr, operator]
            layer.self_attn.k_norm.weight.fill_(gain)  # type: ignore[union-attr, operator]
    assert all(layer.bounded_scores for layer in decoder.pack(torch.float32).layers)
    larger = Decoder(replace(c, rope_scaling=SCALINGS["yarn"]))
    larger.load_state_dict(decoder.state_dict())
    assert larger.config.rope_magnitude > 1.1
    assert not any(layer.bounded_scores for layer in larger.pack(torch.float32).layers)


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_configs_survive_a_round_trip(family: str, name: str) -> None:
    original = scaled(name, family).config
    raw = json.loads(json.dumps(original.to_hf()))
    assert ModelConfig.from_hf(raw, source="x") == original
    # Each of the two keys alone is enough for reading.
    for spelling in ("rope_parameters", "rope_scaling"):
        one = {key: value for key, value in raw.items() if key != spelling}
        assert ModelConfig.from_hf(one, source="x") == original


@pytest.mark.parametrize("name", ["llama3", "yarn every setting", "longrope"])
def test_files_saved_by_transformers_are_read(name: str, tmp_path: Path) -> None:
    decoder = scaled(name)
    save_checkpoint(decoder, tmp_path / "ours")
    load_theirs(tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    assert load_config(tmp_path / "theirs") == decoder.config


def raw_of(scaling: dict[str, Any], *, spelling: str = "rope_scaling", **more: Any) -> Any:
    raw = config("llama", head_dim=8).to_hf()
    del raw["rope_parameters"], raw["rope_theta"]
    return {**raw, spelling: scaling, **more}


def read(raw: dict[str, Any]) -> ModelConfig:
    return ModelConfig.from_hf(raw, source="config.json")


LLAMA = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": ORIGINAL,
    "rope_type": "llama3",
}


def test_published_configurations_are_read() -> None:
    """Llama 3.1, Qwen2.5 with long contexts, and Phi-3, which gives both lengths."""
    assert read(raw_of(LLAMA, rope_theta=5e5)).rope_scaling == SCALINGS["llama3"]
    old = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
    assert read(raw_of(old)).rope_scaling == SCALINGS["yarn"]
    assert read(raw_of({**old, "rope_type": "yarn"})).rope_scaling == SCALINGS["yarn"]
    phi = {"type": "longrope", "short_factor": [1.0, 1.1, 1.5, 2], "long_factor": [1, 2, 4, 8]}
    both = raw_of(phi, original_max_position_embeddings=ORIGINAL, max_position_embeddings=256)
    assert read(both).rope_scaling == SCALINGS["longrope"]
    for nothing in ({"rope_type": "default"}, {"type": "default"}, {}, {"factor": None}):
        assert read(raw_of(nothing)).rope_scaling is None
    theta = read(raw_of({**LLAMA, "rope_theta": 777.0}, spelling="rope_parameters")).rope_theta
    assert theta == 777.0


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [1.0] * 4,
    "original_max_position_embeddings": ORIGINAL,
}


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "lama3"}, "'lama3' is not known; did you mean llama3?; known: default, lin"),
        ({"type": "mrope", "rope_type": "default"}, "rope_type='default' and type='mrope' contrad"),
        ({"type": "mrope"}, "RoPE scaling 'mrope' is not known"),
        ({"rope_type": "linear"}, "rope_scaling.factor is missing, which RoPE scaling 'linear' ne"),
        (
            {"rope_type": "linear", "factor": 0.5},
            "rope_scaling: factor=0.5 must be at least 1; set it",
        ),
        ({"rope_type": "dynamic", "factor": 0}, "factor=0.0 must be at least 1"),
        ({"rope_type": "linear", "factor": "2"}, "factor='2' must be a finite number"),
        ({"rope_type": "linear", "factor": True}, "factor=True must be a finite number"),
        ({"rope_type": "linear", "factor": float("nan")}, "factor=nan must be a finite number"),
        ({"rope_type": "linear", "factor": float("inf")}, "factor=inf must be a finite number"),
        ({"rope_type": "linear", "factor": 2, "beta_fast": 3}, "beta_fast=3 is no setting of RoPE"),
        ({"rope_type": "default", "mrope_section": [1]}, "mrope_section=[1] is no setting of RoPE"),
        ({**LLAMA, "low_freq_factor": None}, "low_freq_factor is missing"),
        (
            {**LLAMA, "high_freq_factor": 1.0},
            "high_freq_factor=1.0 must be above low_freq_factor=1",
        ),
        ({**LLAMA, "low_freq_factor": 0}, "low_freq_factor=0.0 must be above 0"),
        (
            {**LLAMA, "original_max_position_embeddings": None},
            "original_max_position_embeddings is",
        ),
        ({**LLAMA, "original_max_position_embeddings": 6.5}, "=6.5 must be a whole number"),
        ({**LLAMA, "original_max_position_embeddings": 0}, "=0 must be above 1"),
        ({**LLAMA, "low_frequency_factor": 1}, "low_frequency_factor=1 is no setting of RoPE scal"),
        ({**YARN, "beta_fast": 1, "beta_slow": 2}, "beta_fast=1.0 must be above beta_slow=2"),
        ({**YARN, "attention_factor": 0}, "attention_factor=0.0 must be above 0"),
        ({**YARN, "truncate": 1}, "truncate=1 must be true or false"),
        ({**YARN, "rope_theta": 1}, "rope_theta=1 must be above 1 for RoPE scaling yarn"),
        ({**YARN, "rope_theta": -1}, "rope_theta=-1 must be above 0"),
        ({**LONG, "short_factor": 3}, "short_factor=3 must be a list of numbers"),
        ({**LONG, "short_factor": [1, 2, "3", 4]}, "an entry of config.json: rope_scaling.short_f"),
        ({**LONG, "short_factor": [0.0] * 4}, "the least of short_factor=0.0 must be above 0"),
        ({**LONG, "long_factor": [1.0] * 5}, "long_factor has 5 entries, but head_dim=8 has 4"),
        ({"full_attention": LLAMA}, "rope_scaling has separate frequencies for full_attention"),
    ],
)
def test_invalid_rope_scaling_raises_an_error(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(raw_of(scaling))
    assert str(caught.value).startswith(("config.json: ", "an entry of config.json: "))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"rope_parameters": {"rope_type": "default"}},
            "rope_parameters={'rope_type': 'default'} and rope_scaling={'factor': 8.0",
        ),
        ({"rope_parameters": {**LLAMA, "factor": 4.0}}, "contradict each other; remove the one"),
        (
            {"rope_theta": 1e4, "rope_parameters": {**LLAMA, "rope_theta": 5e5}},
            "rope_theta=10000 and rope_parameters.rope_theta=500000 contradict each other",
        ),
        (
            {"original_max_position_embeddings": 32},
            "original_max_position_embeddings=64 and original_max_position_embeddings=32 contra",
        ),
    ],
)
def test_contradictory_rope_settings_raise_an_error(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(raw_of(LLAMA, **change))
    assert message in str(caught.value)


def test_invalid_values_in_a_new_model_raise_config_errors() -> None:
    with pytest.raises(ConfigError, match=r"factor=0\.9 must be at least 1"):
        LinearScaling(factor=0.9)
    with pytest.raises(ConfigError, match="short_factor has 4 entries"):
        config("llama", head_dim=16, rope_scaling=SCALINGS["longrope"])


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("longrope", "original_max_position_embeddings=64, beyond which RoPE scaling 'longrope'"),
        ("dynamic", "max_position_embeddings=256, beyond which RoPE scaling 'dynamic'"),
        ("llama3", "max_position_embeddings=256"),
    ],
)
def test_contexts_that_would_change_the_frequencies_raise_an_error(name: str, reason: str) -> None:
    decoder = scaled(name)
    limit = decoder.config.context_limit
    assert limit.tokens == (ORIGINAL if name == "longrope" else 256)
    assert reason in limit.reason
    logits(decoder, random_ids(1, limit.tokens))
    with pytest.raises(IndexError, match="position "):
        logits(decoder, random_ids(1, limit.tokens + 1))


def test_the_limit_names_the_context_that_yarn_would_allow() -> None:
    own = scaled("yarn").config
    short, whole = replace(own, max_position_embeddings=64), int(4.0 * ORIGINAL)
    assert short.context_limit.tokens == 64
    assert f"'yarn' extends to {whole}" in short.context_limit.reason
    assert f"override_config.max_position_embeddings={whole}" in short.context_limit.reason
    allowed = replace(own, max_position_embeddings=whole).context_limit
    assert allowed.tokens == whole
    assert "extends" not in allowed.reason


def test_longer_contexts_change_all_tokens_in_transformers(tmp_path: Path) -> None:
    """The reason for the limit: with LongRoPE, earlier logits depend on the total length."""
    decoder = scaled("longrope")
    save_checkpoint(decoder, tmp_path)
    model, ids = load_theirs(tmp_path), random_ids(1, ORIGINAL + 1)
    short, long = their_logits(model, ids[:, :-1]), their_logits(model, ids)
    assert not torch.allclose(short[0, 1:], long[0, 1:-1], atol=1e-2)
    assert torch.allclose(short, logits(decoder, ids[:, :-1]), atol=2e-5)
