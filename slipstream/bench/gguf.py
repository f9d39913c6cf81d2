"""Weights of a decoder as a GGUF file, which llama.cpp reads. Used by `contenders`.

The file has no tokenizer: benchmarks give llama.cpp token ids. The layout of the file is version 3
of llama.cpp's `docs/gguf.md`. Matrices are bf16, and vectors fp32, as in llama.cpp's own converter.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Decoder
from slipstream.models.lora import named_weights, value_of

_ALIGNMENT = 32
_VERSION = 3
_UINT32, _FLOAT32, _STRING = 4, 6, 8
"""Types of metadata values."""
_F32, _BF16 = 0, 30
"""Types of tensors."""
_MOSTLY_BF16 = 32
"""The value of `general.file_type` for files whose matrices are bf16."""

_WHOLE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Hugging Face's name of a module -> GGUF's."""

_FAMILIES = ("llama", "qwen2", "qwen3")


def write_gguf(path: Path, decoder: Decoder) -> None:
    """Write the decoder's weights to `path`. Raises ConfigError for a model that this function does
    not translate."""
    config = decoder.config
    check_translatable(config)
    named = {
        gguf_name(name): _stored(name, value_of(weight), config)
        for name, weight in named_weights(decoder)
    }
    with path.open("wb") as file:
        values = metadata(config)
        file.write(b"GGUF" + struct.pack("<IQQ", _VERSION, len(named), len(values)))
        for key, value in values.items():
            file.write(_text(key) + _value(value))
        offset = 0
        for name, tensor in named.items():
            # GGUF lists the innermost dimension first.
            sizes = tensor.shape[::-1]
            file.write(_text(name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes))
            kind = _BF16 if tensor.dtype == torch.bfloat16 else _F32
            file.write(struct.pack("<IQ", kind, offset))
            offset += tensor.nbytes + -tensor.nbytes % _ALIGNMENT
        _pad(file)
        for tensor in named.values():
            # NumPy has no bf16.
            file.write(tensor.view(torch.uint8).numpy().data)
            _pad(file)


def check_translatable(config: ModelConfig) -> None:
    """Raise ConfigError for a family, a RoPE scaling or a window that `write_gguf` does not
    translate."""
    problem = None
    if config.family not in _FAMILIES:
        problem = f"the family {config.family}"
    elif config.rope_scaling is not None:
        problem = f"RoPE scaling {config.rope_scaling.kind!r}"
    elif config.sliding_window is not None:
        problem = f"sliding_window={config.sliding_window}"
    if problem is not None:
        raise ConfigError(
            f"the comparison with llama.cpp does not translate {problem}; give a model of "
            f"{', '.join(_FAMILIES)} without RoPE scaling and sliding windows, or leave out this "
            "peer"
        )


def metadata(config: ModelConfig) -> dict[str, int | float | str]:
    """The metadata of the file: the architecture, and that there is no tokenizer."""
    family = config.family
    return {
        "general.architecture": family,
        "general.name": family,
        "general.file_type": _MOSTLY_BF16,
        "tokenizer.ggml.model": "none",
        f"{family}.vocab_size": config.vocab_size,
        f"{family}.context_length": config.max_position_embeddings,
        f"{family}.embedding_length": config.hidden_size,
        f"{family}.block_count": config.num_layers,
        f"{family}.feed_forward_length": config.intermediate_size,
        f"{family}.attention.head_count": config.num_heads,
        f"{family}.attention.head_count_kv": config.num_kv_heads,
        f"{family}.attention.key_length": config.head_dim,
        f"{family}.attention.value_length": config.head_dim,
        f"{family}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{family}.rope.dimension_count": config.head_dim,
        f"{family}.rope.freq_base": config.rope_theta,
    }


def gguf_name(name: str) -> str:
    """GGUF's name of a tensor. Raises ConfigError for a tensor that llama.cpp does not know."""
    module, _, kind = name.rpartition(".")
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
    if layer is not None and layer[2] in _LAYER:
        return f"blk.{layer[1]}.{_LAYER[layer[2]]}.{kind}"
    if module in _WHOLE:
        return f"{_WHOLE[module]}.{kind}"
    raise ConfigError(f"the comparison with llama.cpp does not translate the tensor {name}")


def interleaved(weight: Tensor, head_dim: int) -> Tensor:
    """The rows of a query or key projection in the order of llama.cpp's `llama` architecture.

    RoPE rotates pairs of rows. Hugging Face pairs row `i` of a head with row `i + head_dim / 2`;
    that architecture pairs row `2 i` with row `2 i + 1`.
    """
    halves = weight.reshape(-1, 2, head_dim // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def _stored(name: str, tensor: Tensor, config: ModelConfig) -> Tensor:
    if config.family == "llama" and (".q_proj." in name or ".k_proj." in name):
        tensor = interleaved(tensor, config.head_dim)
    dtype = torch.bfloat16 if tensor.dim() > 1 else torch.float32
    return tensor.detach().to("cpu", dtype).contiguous()


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def _value(value: float | str) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    if isinstance(value, int):
        return struct.pack("<II", _UINT32, value)
    return struct.pack("<If", _FLOAT32, value)


def _pad(file: BinaryIO) -> None:
    file.write(b"\0" * (-file.tell() % _ALIGNMENT))
