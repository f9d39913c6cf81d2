"""GGUF files: their contents as a reader sees them, the order of rotated rows, refused models."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slipstream.bench.gguf import check_translatable, gguf_name, interleaved, write_gguf
from slipstream.errors import ConfigError
from slipstream.models.rope_scaling import LinearScaling
from tests.models.helpers import config, make_decoder


class Reader:
    """Reads a GGUF file as its specification describes it: metadata and tensors by name."""

    def __init__(self, path: Path) -> None:
        self.data = path.read_bytes()
        self.at = 4
        assert self.data[:4] == b"GGUF"
        version, tensors, values = self.take("<IQQ")
        assert version == 3
        self.metadata = {self.text(): self.value() for _ in range(values)}
        infos = [(self.text(), self.sizes(), self.take("<IQ")) for _ in range(tensors)]
        start = self.at + -self.at % 32
        self.tensors = {
            name: self.tensor(start + offset, sizes, kind) for name, sizes, (kind, offset) in infos
        }
        self.offsets = [offset for _, _, (_, offset) in infos]

    def take(self, form: str) -> tuple[int, ...]:
        found = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return found

    def text(self) -> str:
        (length,) = self.take("<Q")
        self.at += length
        return self.data[self.at - length : self.at].decode()

    def value(self) -> int | str:
        (kind,) = self.take("<I")
        return self.text() if kind == 8 else self.take({4: "<I", 6: "<f"}[kind])[0]

    def sizes(self) -> list[int]:
        (count,) = self.take("<I")
        return list(self.take(f"<{count}Q"))

    def tensor(self, at: int, sizes: list[int], kind: int) -> Tensor:
        dtype = {0: torch.float32, 30: torch.bfloat16}[kind]
        count = torch.Size(sizes).numel()
        flat = torch.frombuffer(bytearray(self.data), dtype=dtype, count=count, offset=at)
        return flat.reshape(sizes[::-1])


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_file_holds_all_weights_and_the_architecture(
    family: str, tied: bool, tmp_path: Path
) -> None:
    # A width with which some tensors end between multiples of 32 bytes, where the next one starts.
    decoder = make_decoder(family, tie_word_embeddings=tied, hidden_size=44)
    write_gguf(tmp_path / "m.gguf", decoder)
    read = Reader(tmp_path / "m.gguf")
    c = decoder.config
    assert read.metadata == {
        "general.architecture": family,
        "general.name": family,
        "general.file_type": 32,
        "tokenizer.ggml.model": "none",
        f"{family}.vocab_size": 96,
        f"{family}.context_length": 256,
        f"{family}.embedding_length": 44,
        f"{family}.block_count": 3,
        f"{family}.feed_forward_length": 80,
        f"{family}.attention.head_count": 6,
        f"{family}.attention.head_count_kv": 2,
        f"{family}.attention.key_length": c.head_dim,
        f"{family}.attention.value_length": c.head_dim,
        f"{family}.attention.layer_norm_rms_epsilon": pytest.approx(1e-5),
        f"{family}.rope.dimension_count": c.head_dim,
        f"{family}.rope.freq_base": 5000.0,
    }
    weights = dict(decoder.named_parameters())
    assert len(read.tensors) == len(weights)
    assert ("output.weight" in read.tensors) is not tied
    for name, weight in weights.items():
        stored = read.tensors[gguf_name(name)]
        wanted = weight.detach()
        if family == "llama" and ("q_proj" in name or "k_proj" in name):
            wanted = interleaved(wanted, c.head_dim)
        assert stored.dtype == (torch.bfloat16 if weight.dim() > 1 else torch.float32), name
        assert torch.equal(stored, wanted.to(stored.dtype)), name
    assert all(offset % 32 == 0 for offset in read.offsets)
    assert (tmp_path / "m.gguf").stat().st_size % 32 == 0


def test_names_are_those_of_llama_cpp() -> None:
    assert gguf_name("model.embed_tokens.weight") == "token_embd.weight"
    assert gguf_name("model.layers.11.self_attn.q_proj.bias") == "blk.11.attn_q.bias"
    assert gguf_name("model.layers.0.post_attention_layernorm.weight") == "blk.0.ffn_norm.weight"
    with pytest.raises(ConfigError, match=r"does not translate the tensor .*gate_up_proj"):
        gguf_name("model.layers.0.mlp.gate_up_proj.weight")


def test_interleaved_rows_give_the_same_scores_under_the_other_rotation() -> None:
    heads, dim, position = 3, 8, 5
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, heads * dim, 4, generator=generator).unbind()
    x = torch.randn(4, generator=generator)
    angles = position * 10.0 ** -(torch.arange(dim // 2) / (dim // 2))

    def rotated(first: Tensor, second: Tensor) -> Tensor:
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def halves(weight: Tensor) -> Tensor:
        y = (weight @ x).view(heads, dim)
        return rotated(y[:, : dim // 2], y[:, dim // 2 :])

    def pairs(weight: Tensor) -> Tensor:
        y = (interleaved(weight, dim) @ x).view(heads, dim)
        return rotated(y[:, 0::2], y[:, 1::2])

    # The rotated rows, in whatever order, are the same, so their products are.
    assert torch.allclose(halves(q), pairs(q))
    assert torch.allclose((halves(q) * halves(k)).sum(-1), (pairs(q) * pairs(k)).sum(-1))
    assert not torch.equal(interleaved(q, dim), q)


@pytest.mark.parametrize(
    ("family", "more", "message"),
    [
        ("mistral", {}, "the family mistral"),
        ("llama", {"rope_scaling": LinearScaling(factor=2.0)}, "RoPE scaling 'linear'"),
        ("qwen2", {"sliding_window": 9, "windowed_layers": (1,)}, "sliding_window=9"),
    ],
)
def test_models_that_are_not_translated_are_refused(
    family: str, more: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"does not translate {message}.*leave out this peer"):
        check_translatable(config(family, **more))
