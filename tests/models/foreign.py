"""Tiny random checkpoints of architectures that run through transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, dict[str, Any]] = {
    # Learned positions, tied embeddings, transposed matrices, dropout.
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 100},
    # Soft caps, windows in every other layer, tied and scaled embeddings.
    "gemma2": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 16,
        "max_position_embeddings": 256,
    },
    # Joined projections.
    "phi3": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
    },
    # A family that the built-in decoder supports, but with unsupported biases.
    "llama": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
        "attention_bias": True,
    },
    # No positions, but ALiBi slopes.
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 2},
    # Experts, most of them without a gradient in a small batch.
    "mixtral": {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_local_experts": 8,
        "num_experts_per_tok": 1,
        "max_position_embeddings": 256,
    },
}
KINDS = list(SIZES)


def make_foreign(kind: str, *, vocab_size: int = 96, seed: int = 0, **more: Any) -> Any:
    """Return a causal language model of transformers whose distributions are far from uniform."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **SIZES[kind], **more}
    config = AutoConfig.for_model(kind, vocab_size=vocab_size, **settings)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim >= 2 and "norm" not in name and "ln" not in name:
                    parameter.mul_(4)
    return model.eval()


def save_foreign(kind: str, folder: Path, **more: Any) -> Path:
    """Save the model of `make_foreign` as a Hugging Face folder. Return the folder."""
    make_foreign(kind, **more).save_pretrained(str(folder))
    return folder
