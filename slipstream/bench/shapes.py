"""Models for benchmarks. Their weights are random, because speed does not depend on them."""

from __future__ import annotations

from dataclasses import replace

from slipstream.errors import ConfigError
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Decoder

SHAPES = {
    # The quickstart's policy with the vocabulary of its task.
    "quickstart": ModelConfig(
        family="qwen3",
        vocab_size=128,
        hidden_size=192,
        intermediate_size=512,
        num_layers=12,
        num_heads=6,
        num_kv_heads=2,
        head_dim=32,
    ),
    # Wide enough that matrix products dominate the time.
    "d512x12": ModelConfig(
        family="qwen3",
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1536,
        num_layers=12,
        num_heads=8,
        num_kv_heads=4,
        head_dim=64,
    ),
    # Small enough (6.5M weights) that the calls around the products dominate the time.
    "d256x8": ModelConfig(
        family="qwen3",
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=768,
        num_layers=8,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
    ),
    # SmolLM2-135M.
    "smollm2-135m": ModelConfig(
        family="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rope_theta=100_000.0,
    ),
    # Qwen2.5-0.5B.
    "qwen2.5-0.5b": ModelConfig(
        family="qwen2",
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        rope_theta=1_000_000.0,
    ),
    # For tests: shows that a benchmark runs; its numbers have no meaning.
    "tiny": ModelConfig(
        family="qwen3",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_layers=3,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
    ),
}


def make_decoder(
    shape: str, *, max_positions: int, vocab_size: int | None = None, seed: int = 0
) -> Decoder:
    """A decoder of the named shape; `vocab_size`, if given, replaces the shape's.

    Raises ConfigError for an unknown name.
    """
    if shape not in SHAPES:
        raise ConfigError(f"unknown shape {shape!r}; known: {', '.join(SHAPES)}")
    config = replace(
        SHAPES[shape],
        max_position_embeddings=max_positions,
        vocab_size=SHAPES[shape].vocab_size if vocab_size is None else vocab_size,
    )
    decoder = Decoder(config)
    decoder.init_weights(seed)
    return decoder


def matmul_parameters(config: ModelConfig) -> tuple[int, int]:
    """Numbers of weights in matrix products: (of all layers, of the LM head)."""
    heads = config.num_heads + 2 * config.num_kv_heads
    layer = config.hidden_size * heads * config.head_dim
    layer += config.num_heads * config.head_dim * config.hidden_size
    layer += 3 * config.hidden_size * config.intermediate_size
    return layer * config.num_layers, config.hidden_size * config.vocab_size
