"""Tiny random policies in which every parameter matters, and their transformers counterparts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from slipstream.models import Decoder, ModelConfig

FAMILIES = ["qwen2", "qwen3", "llama", "mistral"]
VOCAB = 96


def config(family: str, **more: Any) -> ModelConfig:
    values: dict[str, Any] = {
        "family": family,
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_layers": 3,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 16 if family == "qwen3" else 8,
        "max_position_embeddings": 256,
        "rope_theta": 5000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return ModelConfig(**{**values, **more})


@torch.no_grad()
def make_decoder(family: str = "qwen2", *, seed: int = 0, **more: Any) -> Decoder:
    """Return a decoder with non-zero biases, norm gains other than 1, and logits of order 1."""
    decoder = Decoder(config(family, **more))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in decoder.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        if name.endswith("norm.weight"):
            parameter.copy_(1 + 0.2 * drawn)
        elif name.endswith("bias"):
            parameter.copy_(0.5 * drawn)
        elif name == "model.embed_tokens.weight":
            parameter.copy_(drawn * 0.3)
        else:
            parameter.copy_(drawn / parameter.shape[1] ** 0.5)
    return decoder


def logits(decoder: Decoder, ids: torch.Tensor) -> torch.Tensor:
    """Return our logits (B, T, V) in fp32. Inputs are padded as exact mode requires."""
    with torch.no_grad():
        packed = decoder.pack(torch.float32)
        B, T = ids.shape
        width = -(-T // 4) * 4
        padded = torch.cat([ids, ids.new_zeros(B, width - T)], 1)
        hidden = packed.forward(padded, torch.arange(width).expand(B, -1)).final
        return (hidden @ packed.lm_head.weight.T)[:, :T]


def load_theirs(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def their_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(input_ids=ids).logits
    return out


def random_ids(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))
