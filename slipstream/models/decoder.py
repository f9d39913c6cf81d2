"""The decoder: token ids to hidden states. Qwen2, Qwen3 and Llama in one readable form.

`Decoder` owns the parameters under their Hugging Face names (fp32 master weights when it trains).
`Decoder.pack` turns them into a `PackedDecoder`: cast to the compute dtype, q|k|v and gate|up
concatenated. The forward pass is a function of the packed weights alone, so the trainer (which
packs with gradients, once per micro-batch) and the engine (once per weight update) run the same
operations on the same shapes. It does not know about sampling, losses, log-probs or batching.

Shapes: B sequences, T tokens, M = B * T rows, D hidden width, H key-value heads, G query heads per
key-value head, K head width, S key slots.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from slipstream.models.attention import (
    SCORE_BOUND,
    Context,
    as_context,
    attend,
    causal_mask,
    fold_queries,
    padded_keys,
    unfold_queries,
)
from slipstream.models.config import ModelConfig
from slipstream.models.linear import PackedLinear, PackedPair
from slipstream.models.numerics import ROW_MULTIPLE


class KVCache(Protocol):
    """Where an engine keeps keys and values; positions are slots (contiguous)."""

    @property
    def num_keys(self) -> int:
        """Key slots that `extend` returns: what `attention.padded_keys` gives."""
        ...

    @property
    def num_seen(self) -> int:
        """Key slots from 0 on that every query of this pass sees; a multiple of 16."""
        ...

    def extend(self, layer: int, k_BTHK: Tensor, v_BTHK: Tensor) -> Context:
        """Store new keys and values of one layer; return all of them."""
        ...


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """What a forward pass yields.

    `final` (B, T, D) has gone through the last norm: the input of every head. `taps` are outputs of
    the requested layers, before any norm (EAGLE-3's features).
    """

    final: Tensor
    taps: dict[int, Tensor]


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """Weights of one layer as the forward pass uses them."""

    input_norm: Tensor | None
    """None in a draft head, whose input has been mixed already."""
    qkv: PackedLinear
    qk_norm: Tensor | None
    """(H * G + H, K): the query norm for every query head, then the key norm."""
    bounded_scores: bool
    """Whether the norms keep every attention score within `attention.SCORE_BOUND`."""
    out: PackedLinear
    post_norm: Tensor
    gate_up: PackedPair
    down: PackedLinear


class _Attention(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, q, bias=c.attention_bias)
        self.k_proj = nn.Linear(c.hidden_size, kv, bias=c.attention_bias)
        self.v_proj = nn.Linear(c.hidden_size, kv, bias=c.attention_bias)
        self.o_proj = nn.Linear(q, c.hidden_size, bias=False)
        if c.qk_norm:
            self.q_norm = _Norm(c.head_dim)
            self.k_norm = _Norm(c.head_dim)


class _Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class _MLP(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)


class Layer(nn.Module):
    """The parameters of one decoder layer, under their Hugging Face names."""

    def __init__(self, c: ModelConfig, *, input_norm: bool = True) -> None:
        super().__init__()
        self.self_attn = _Attention(c)
        self.mlp = _MLP(c)
        self.input_layernorm = _Norm(c.hidden_size) if input_norm else None
        self.post_attention_layernorm = _Norm(c.hidden_size)

    def pack(self, c: ModelConfig, dtype: torch.dtype) -> PackedLayer:
        """Weights as `layer_forward` uses them. Differentiable."""
        a, m, first = self.self_attn, self.mlp, self.input_layernorm
        bias = norm = None
        bounded = False
        if c.attention_bias:
            bias = torch.cat([a.q_proj.bias, a.k_proj.bias, a.v_proj.bias]).to(dtype)
        if c.qk_norm:
            norm = torch.cat(
                [
                    a.q_norm.weight.expand(c.num_heads, -1),
                    a.k_norm.weight.expand(c.num_kv_heads, -1),
                ]
            ).to(dtype)
            # Of a device's memory the question would be waited for.
            if norm.device.type == "cpu":
                widest = norm.detach().float().abs().amax(-1)
                bound = widest[: c.num_heads].amax() * widest[c.num_heads :].amax()
                bounded = float(bound) * c.head_dim**0.5 <= SCORE_BOUND
        return PackedLayer(
            input_norm=None if first is None else first.weight.to(dtype),
            qkv=PackedLinear.of(
                torch.cat([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight]).to(dtype), bias
            ),
            qk_norm=norm,
            bounded_scores=bounded,
            out=PackedLinear.of(a.o_proj.weight.to(dtype)),
            post_norm=self.post_attention_layernorm.weight.to(dtype),
            gate_up=PackedPair.of(m.gate_proj.weight.to(dtype), m.up_proj.weight.to(dtype)),
            down=PackedLinear.of(m.down_proj.weight.to(dtype)),
        )


class _Trunk(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_layers))
        self.norm = _Norm(c.hidden_size)


@torch.no_grad()
def init_parameters(module: nn.Module, std: float, num_layers: int, seed: int) -> None:
    """Normal(0, std); projections into the residual stream are scaled by 1/sqrt(2 * num_layers)
    (GPT-2), biases are zero and norms one."""
    generator = torch.Generator().manual_seed(seed)
    residual = std / (2 * num_layers) ** 0.5
    for name, parameter in module.named_parameters():
        if parameter.ndim == 2:
            into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            drawn = torch.empty(parameter.shape).normal_(
                0.0, residual if into_residual else std, generator=generator
            )
            parameter.copy_(drawn)
        elif name.endswith("bias"):
            parameter.zero_()
        else:
            parameter.fill_(1.0)


class Decoder(nn.Module):
    """The parameters, under their Hugging Face names (`model.layers.0.self_attn.q_proj.weight`).

    With tied embeddings there is no `lm_head.weight`, as in Hugging Face checkpoints.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = _Trunk(config)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def device(self) -> torch.device:
        return self.model.embed_tokens.weight.device

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """See `init_parameters`."""
        init_parameters(self, self.config.initializer_range, self.config.num_layers, seed)

    @property
    def lm_head_weight(self) -> Tensor:
        """(V, D); the embedding when tied."""
        if self.config.tie_word_embeddings:
            return self.model.embed_tokens.weight
        return self.lm_head.weight

    def pack(self, dtype: torch.dtype) -> PackedDecoder:
        """Weights as the forward pass uses them. Differentiable with respect to the parameters."""
        layers: Iterator[nn.Module] = iter(self.model.layers)
        packed = []
        for layer in layers:
            assert isinstance(layer, Layer)
            packed.append(layer.pack(self.config, dtype))
        return PackedDecoder(
            config=self.config,
            embedding=self.model.embed_tokens.weight.to(dtype),
            layers=packed,
            norm=self.model.norm.weight.to(dtype),
            eps=torch.full((), self.config.rms_norm_eps, device=self.device),
            lm_head=PackedLinear.of(self.lm_head_weight.to(dtype)),
        )


@dataclass(frozen=True, slots=True)
class PackedDecoder:
    """Weights in compute form, and the forward pass over them."""

    config: ModelConfig
    embedding: Tensor
    layers: list[PackedLayer]
    norm: Tensor
    eps: Tensor
    """Of every norm, a scalar in fp32."""
    lm_head: PackedLinear

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def row_multiple(self) -> int:
        """How many tokens the products need at a time to be exact: any number where all weights are
        laid out (`linear`)."""
        weights = [self.lm_head]
        for layer in self.layers:
            weights += [layer.qkv, layer.out, layer.gate_up.joined, layer.down]
        return 1 if all(weight.prepared is not None for weight in weights) else ROW_MULTIPLE

    def forward(
        self,
        ids_BT: Tensor,
        positions_BT: Tensor,
        *,
        kv_cache: KVCache | None = None,
        taps: Collection[int] = (),
        recompute: bool = False,
    ) -> HiddenStates:
        """Hidden states of `ids_BT` (int64) at `positions_BT`.

        Without a cache the sequences stand alone: positions must be 0 .. T-1; pad on the right, the
        causal mask keeps padding unseen. With a cache, keys and values are stored in it and earlier
        ones are attended to. In exact mode B * T must be a multiple of `row_multiple`.
        `recompute` trades time for memory in the backward pass (gradient checkpointing).
        """
        shared = start_pass(positions_BT, self.config, self.dtype, self.eps, kv_cache)
        kept: dict[int, Tensor] = {}
        B, T = ids_BT.shape
        # Rows, not sequences: each product would flatten its input, and few rows make that dear.
        x = F.embedding(ids_BT.flatten(), self.embedding)
        for index, layer in enumerate(self.layers):
            if recompute:
                x = checkpoint(layer_forward, layer, index, x, shared, use_reentrant=False)
            else:
                x = layer_forward(layer, index, x, shared)
            if index in taps:
                kept[index] = x.view(B, T, -1)
        return HiddenStates(rms_norm(x, self.norm, self.eps).view(B, T, -1), kept)


@dataclass(frozen=True, slots=True)
class Pass:
    """What the layers of one forward pass share: `start_pass` makes it."""

    config: ModelConfig
    eps: Tensor
    cos: Tensor
    sin: Tensor
    num_keys: int
    mask_NRX: Tensor
    kv_cache: KVCache | None


def start_pass(
    positions_BT: Tensor,
    config: ModelConfig,
    dtype: torch.dtype,
    eps: Tensor,
    kv_cache: KVCache | None = None,
) -> Pass:
    """Rotations and mask for queries at `positions_BT`; see `PackedDecoder.forward`."""
    if kv_cache is None:
        num_keys, seen = padded_keys(positions_BT.shape[1], dtype, positions_BT.device), 0
    else:
        num_keys, seen = kv_cache.num_keys, kv_cache.num_seen
    mask = causal_mask(positions_BT, num_keys, config.num_kv_heads, config.group_size, seen)
    cos, sin = rope_tables(positions_BT, config, dtype)
    return Pass(config, eps, cos, sin, num_keys, mask, kv_cache)


def layer_forward(w: PackedLayer, index: int, x_MD: Tensor, shared: Pass) -> Tensor:
    """One layer over rows (M, D); `index` is its place in the cache."""
    c, eps = shared.config, shared.eps
    B, T = shared.cos.shape[:2]
    Q, H = c.num_heads, c.num_kv_heads
    normed = x_MD if w.input_norm is None else rms_norm(x_MD, w.input_norm, eps)
    qk, v = w.qkv(normed).view(B, T, Q + 2 * H, c.head_dim).split_with_sizes([Q + H, H], 2)
    if w.qk_norm is not None:
        qk = rms_norm(qk, w.qk_norm, eps)
    q, k = rotate(qk, shared.cos, shared.sin).split_with_sizes([Q, H], 2)
    if shared.kv_cache is None:
        context = as_context(_pad_keys(k, shared.num_keys), _pad_keys(v, shared.num_keys))
    else:
        context = shared.kv_cache.extend(index, k, v)
    attended = attend(fold_queries(q, H), context, shared.mask_NRX, w.bounded_scores)
    x_MD = w.out.added_to(x_MD, unfold_queries(attended, T, H, c.group_size))
    gate, up = w.gate_up(rms_norm(x_MD, w.post_norm, eps))
    return w.down.added_to(x_MD, F.silu(gate) * up)


def _pad_keys(x_BTHK: Tensor, num_keys: int) -> Tensor:
    """(B, T, H, K) -> (B * H, S, K), zeros beyond T (their weights are exactly zero)."""
    x = x_BTHK.transpose(1, 2)
    missing = num_keys - x.shape[2]
    return (F.pad(x, (0, 0, 0, missing)) if missing else x).flatten(0, 1)


def rms_norm(x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    """x / rms(x) * weight over the last axis, the mean in fp32 (Zhang and Sennrich 2019).

    `eps` a scalar in fp32 on the device of `x`: made once, for it would cost as much as the sum.
    """
    wide = x.float()
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = torch.addcmul(eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()
    normed = wide * scale
    return (normed if x is wide else normed.to(x.dtype)) * weight


def rope_tables(positions_BT: Tensor, c: ModelConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin (B, T, 1, K) of rotary embeddings (Su et al. 2021), the sign of the rotation in
    the sine: x * cos + roll(x, K/2) * sin."""
    cos, sin = _rope_table(
        c.rope_theta, c.head_dim, c.max_position_embeddings, dtype, positions_BT.device
    )
    return cos[positions_BT][:, :, None], sin[positions_BT][:, :, None]


@cache
@torch.inference_mode(False)
def _rope_table(
    theta: float, head_dim: int, positions: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    # One table for all callers: sines computed in buffers of other sizes may differ in a bit. An
    # ordinary tensor even when an engine asks first: the trainer's backward pass needs it, too.
    exponents = torch.arange(0, head_dim, 2, device=device).float() / head_dim
    # Times the reciprocal, as transformers does: far positions are sensitive to the last bit.
    angles = torch.arange(positions, device=device).float()[:, None] * (1.0 / theta**exponents)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype)


def rotate(x_BTHK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of queries or keys (B, T, H, K)."""
    return torch.addcmul(x_BTHK * cos, x_BTHK.roll(x_BTHK.shape[-1] // 2, -1), sin)
