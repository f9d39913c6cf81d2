"""Models for benchmarks: random weights, because speed does not depend on them, or a folder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from slipstream.errors import ConfigError
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Decoder
from slipstream.models.hf_io import load_checkpoint, load_config

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
    # A small model with a large vocabulary.
    "wordy": ModelConfig(
        family="llama",
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=192,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
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

PUBLISHED = ("smollm2-135m", "qwen2.5-0.5b")
"""Shapes of published models. Their own vocabulary is the default in all benchmarks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchModel:
    """A model of a benchmark: random weights of a shape, or those of a Hugging Face folder.

    `vocab_size`, if given, replaces the shape's. With `folder`, `shape` and `vocab_size` are
    ignored.
    """

    shape: str = "tiny"
    vocab_size: int | None = None
    folder: Path | None = None

    @property
    def config(self) -> ModelConfig:
        """The architecture, without weights. Raises CheckpointError for an unreadable folder."""
        if self.folder is not None:
            return load_config(self.folder)
        return _config(self.shape, self.vocab_size)

    def decoder(self, max_positions: int) -> Decoder:
        """The model for sequences of up to `max_positions` tokens.

        Raises CheckpointError for an unreadable folder, and ConfigError for an unknown shape or if
        the model of the folder was not made for such long sequences.
        """
        if self.folder is None:
            return make_decoder(self.shape, max_positions=max_positions, vocab_size=self.vocab_size)
        limit = self.config.context_limit
        if limit.tokens < max_positions:
            raise ConfigError(
                f"{self.folder}: {limit.reason}, and the benchmark needs {max_positions}; shorten "
                "prompts or responses"
            )
        return load_checkpoint(self.folder)


def make_decoder(
    shape: str, *, max_positions: int, vocab_size: int | None = None, seed: int = 0
) -> Decoder:
    """A decoder of the named shape; `vocab_size`, if given, replaces the shape's.

    Raises ConfigError for an unknown name.
    """
    decoder = Decoder(replace(_config(shape, vocab_size), max_position_embeddings=max_positions))
    decoder.init_weights(seed)
    return decoder


def _config(shape: str, vocab_size: int | None) -> ModelConfig:
    if shape not in SHAPES:
        raise ConfigError(f"unknown shape {shape!r}; known: {', '.join(SHAPES)}")
    config = SHAPES[shape]
    return config if vocab_size is None else replace(config, vocab_size=vocab_size)


def matmul_parameters(config: ModelConfig) -> tuple[int, int]:
    """Numbers of weights in matrix products: (of all layers, of the LM head)."""
    heads = config.num_heads + 2 * config.num_kv_heads
    layer = config.hidden_size * heads * config.head_dim
    layer += config.num_heads * config.head_dim * config.hidden_size
    layer += 3 * config.hidden_size * config.intermediate_size
    return layer * config.num_layers, config.hidden_size * config.vocab_size
