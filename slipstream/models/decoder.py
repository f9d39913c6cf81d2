"""The decoder maps token ids to hidden states. It covers Qwen2, Qwen3, Llama and Mistral.

`Decoder` owns the parameters under their Hugging Face names (fp32 master weights in training).
`Decoder.pack` turns them into a `PackedDecoder`. Packing concatenates q|k|v and gate|up, casts
matrices to the compute dtype and all else to the dtype of activations
(`numerics.activation_dtype`). The forward pass is a function of the packed weights alone. So the
trainer (which packs with gradients, once per micro-batch) and the engine (which packs once per
weight update) run the same operations on the same shapes.

This module knows nothing about sampling, losses, log-probs or batching.

Shapes: B sequences, T tokens of a sequence, M = B * T rows (tokens of a forward pass), D hidden
width, V vocabulary, Q query heads, H key-value heads, G = Q / H query heads per key-value head,
K head width, S key slots.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from slipstream.models.attention import SCORE_BOUND, KVCache, TorchAttention
from slipstream.models.config import ModelConfig
from slipstream.models.cpu_attention import CpuAttention, KeyPlaces, supports_attention
from slipstream.models.cpu_layers import CpuLayers, supports_layers
from slipstream.models.functional import add_norm, gated
from slipstream.models.linear import PackedLinear
from slipstream.models.numerics import activation_dtype, has_kernels, row_multiple
from slipstream.models.shared_rows import SharedRows


class Attention(Protocol):
    """The attention of all layers in one forward pass."""

    def __call__(self, index: int, qkv: Tensor, norms: Tensor | None, bounded: bool) -> Tensor:
        """Return the attention output (M, Q * K) of layer `index`.

        `qkv` (M, (Q + 2H) * K) holds the joined projections. `norms` and `bounded` are
        `PackedLayer.qk_norm` and `PackedLayer.bounded_scores`.
        """
        ...


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """The result of a forward pass.

    `final` (B, T, D) is the output of the last norm and the input of every head. `aux_layers`
    (B, T, n * D) concatenates the inputs of the n requested layers, before any norm and without
    gradients (the features of EAGLE-3). It is None if no layer was requested.
    """

    final: Tensor
    aux_layers: Tensor | None

    def side_by_side(self) -> Tensor:
        """Return auxiliary layers, if any, and final states concatenated: (B, T, (n + 1) * D)."""
        return (
            self.final if self.aux_layers is None else torch.cat([self.aux_layers, self.final], -1)
        )

    @property
    def features(self) -> Tensor:
        """The features for a draft head: the auxiliary layers if there are any, else `final`."""
        return self.final if self.aux_layers is None else self.aux_layers

    def at(self, row: int) -> Tensor:
        """Return a copy of one row of `flat` states, concatenated as in `side_by_side`: (F,)."""
        final = self.final[row]
        return (
            final.clone() if self.aux_layers is None else torch.cat([self.aux_layers[row], final])
        )

    @classmethod
    def split(cls, states: Tensor, width: int) -> HiddenStates:
        """Return the states that `side_by_side` concatenated; `width` is D."""
        if states.shape[-1] == width:
            return cls(states, None)
        return cls(states[..., -width:], states[..., :-width])

    def flat(self) -> HiddenStates:
        """Return the states as rows (B * T, ...)."""
        aux_layers = self.aux_layers
        return HiddenStates(
            self.final.flatten(0, 1), None if aux_layers is None else aux_layers.flatten(0, 1)
        )

    def all_of(self, shared: SharedRows) -> HiddenStates:
        """Return the states of all rows of `shared`, from those of the computed ones."""
        aux_layers = self.aux_layers
        return HiddenStates(
            shared.all_of(self.final), None if aux_layers is None else shared.all_of(aux_layers)
        )

    def in_sequences(self, count: int) -> HiddenStates:
        """Return rows as `count` sequences (B, T, ...)."""
        aux_layers = self.aux_layers
        return HiddenStates(
            self.final.view(count, -1, self.final.shape[-1]),
            None if aux_layers is None else aux_layers.view(count, -1, aux_layers.shape[-1]),
        )


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """The weights of one layer as the forward pass uses them."""

    input_norm: Tensor | None
    """None in an EAGLE-1 draft head, which has no norm before its layer."""
    qkv: PackedLinear
    qk_norm: Tensor | None
    """(Q + H, K): the query norm's gains for each query head, then the key norm's for each key."""
    bounded_scores: bool
    """Whether the norms keep every attention score within `attention.SCORE_BOUND`."""
    out: PackedLinear
    post_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear


_SKIPS_INIT: ContextVar[bool] = ContextVar("_SKIPS_INIT", default=False)


@contextlib.contextmanager
def without_init() -> Iterator[None]:
    """Leave the weights of new decoders uninitialized. The caller must load all of them.

    Drawing random numbers takes as long as reading a checkpoint.
    """
    token = _SKIPS_INIT.set(True)
    try:
        yield
    finally:
        _SKIPS_INIT.reset(token)


class Linear(nn.Linear):
    """A linear layer with torch's initial weights, or none in `without_init`."""

    def reset_parameters(self) -> None:
        """Draw initial weights."""
        if not _SKIPS_INIT.get():
            super().reset_parameters()


class Embedding(nn.Embedding):
    """An embedding with torch's initial weights, or none in `without_init`."""

    def reset_parameters(self) -> None:
        """Draw initial weights."""
        if not _SKIPS_INIT.get():
            super().reset_parameters()


class _Attention(nn.Module):
    def __init__(self, c: ModelConfig, inputs: int) -> None:
        super().__init__()
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.q_proj = Linear(inputs, q, bias=c.attention_bias)
        self.k_proj = Linear(inputs, kv, bias=c.attention_bias)
        self.v_proj = Linear(inputs, kv, bias=c.attention_bias)
        self.o_proj = Linear(q, c.hidden_size, bias=False)
        if c.qk_norm:
            self.q_norm = Norm(c.head_dim)
            self.k_norm = Norm(c.head_dim)


class Norm(nn.Module):
    """The parameters (gains) of an RMS norm."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class _MLP(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = Linear(c.intermediate_size, c.hidden_size, bias=False)


class Layer(nn.Module):
    """The parameters of one decoder layer, under their Hugging Face names.

    As a module call, the layer packs its weights and runs. FSDP2 hooks into that call to gather the
    weights for just this long (`models.sharded`). Without FSDP2 all layers are packed in advance.
    """

    def __init__(
        self, c: ModelConfig, *, input_norm: bool = True, inputs: int | None = None
    ) -> None:
        """`inputs` is the input width of the q, k and v projections; None: the hidden size."""
        super().__init__()
        self.self_attn = _Attention(c, c.hidden_size if inputs is None else inputs)
        self.mlp = _MLP(c)
        self.input_layernorm = Norm(c.hidden_size) if input_norm else None
        self.post_attention_layernorm = Norm(c.hidden_size)

    def pack(self, c: ModelConfig, dtype: torch.dtype) -> PackedLayer:
        """Return the weights as `layer_forward` uses them. Differentiable."""
        a, m, first = self.self_attn, self.mlp, self.input_layernorm
        rows = activation_dtype(dtype, self.post_attention_layernorm.weight.device)
        bias = norm = None
        bounded = False
        if c.attention_bias:
            bias = torch.cat([a.q_proj.bias, a.k_proj.bias, a.v_proj.bias]).to(rows)
        if c.qk_norm:
            norm = self.qk_norm(c).to(rows)
            # On a GPU, reading the bound would make the host wait for the device.
            if norm.device.type == "cpu":
                widest = norm.detach().float().abs().amax(-1)
                bound = widest[: c.num_heads].amax() * widest[c.num_heads :].amax()
                # Rotation keeps the length of a vector, except for the magnitude of cos and sin.
                largest = c.rope_magnitude**2 * c.head_dim**0.5
                bounded = float(bound) * largest <= SCORE_BOUND
        return PackedLayer(
            input_norm=None if first is None else first.weight.to(rows),
            qkv=PackedLinear.of(_joined(dtype, a.q_proj, a.k_proj, a.v_proj), bias),
            qk_norm=norm,
            bounded_scores=bounded,
            out=PackedLinear.of(a.o_proj.weight.to(dtype)),
            post_norm=self.post_attention_layernorm.weight.to(rows),
            gate_up=PackedLinear.of(_joined(dtype, m.gate_proj, m.up_proj)),
            down=PackedLinear.of(m.down_proj.weight.to(dtype)),
        )

    def qk_norm(self, c: ModelConfig) -> Tensor:
        """Return `PackedLayer.qk_norm`, (Q + H, K), from the parameters."""
        a = self.self_attn
        gains = a.q_norm.weight.expand(c.num_heads, -1), a.k_norm.weight.expand(c.num_kv_heads, -1)
        return torch.cat(gains)

    def forward(
        self,
        c: ModelConfig,
        dtype: torch.dtype,
        index: int,
        x_MD: Tensor,
        delta_MD: Tensor | None,
        attention: Attention,
        eps: Tensor,
        recompute: bool,
    ) -> tuple[Tensor, Tensor]:
        """Run `layer_forward` with weights that are packed for this call only.

        With `recompute`, the backward pass packs them again instead of storing them.
        """

        def run(x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
            return layer_forward(self.pack(c, dtype), index, x, delta, attention, eps)

        return _run(recompute, run, x_MD, delta_MD)


def _joined(dtype: torch.dtype, *linears: nn.Linear) -> Tensor:
    """Return the weights one below the other. Rounding first halves the bytes to copy."""
    return torch.cat([linear.weight.to(dtype) for linear in linears])


class _Trunk(nn.Module):
    """The parameters under `model.` in a Hugging Face checkpoint."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_layers))
        self.norm = Norm(c.hidden_size)


@torch.no_grad()
def init_parameters(module: nn.Module, std: float, num_layers: int, seed: int) -> None:
    """Draw the weights of `module` from Normal(0, std), as a function of `seed` alone.

    Projections into the residual stream are scaled by 1/sqrt(2 * num_layers) (GPT-2). Biases are 0
    and norm gains 1.
    """
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

    With tied embeddings there is no `lm_head.weight`, as in Hugging Face checkpoints. `pack` gives
    the form that computes.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = _Trunk(config)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def device(self) -> torch.device:
        return self.model.embed_tokens.weight.device

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Initialize all weights by `init_parameters`."""
        init_parameters(self, self.config.initializer_range, self.config.num_layers, seed)

    @property
    def lm_head_weight(self) -> Tensor:
        """The LM head's weight (V, D); with tied embeddings it is the embedding."""
        if self.config.tie_word_embeddings:
            return self.model.embed_tokens.weight
        return self.lm_head.weight

    @property
    def layers(self) -> list[Layer]:
        """The layers in order."""
        found: list[Layer] = []
        modules: Iterator[nn.Module] = iter(self.model.layers)
        for layer in modules:
            assert isinstance(layer, Layer)
            found.append(layer)
        return found

    def pack(self, dtype: torch.dtype) -> PackedDecoder:
        """Return the weights in compute form. Differentiable with respect to the parameters."""
        packed = [layer.pack(self.config, dtype) for layer in self.layers]
        norm, eps = self._norm(dtype)
        fused = None
        if has_kernels(norm.dtype, self.device) and supports_layers(self.config, dtype):
            fused = CpuLayers(packed, self.config, eps, norm)
        return PackedDecoder(
            config=self.config,
            embedding=self.model.embed_tokens.weight.to(norm.dtype),
            layers=packed,
            norm=norm,
            eps=eps,
            fused=fused,
            lm_head=PackedLinear.of(self.lm_head_weight.to(dtype)),
        )

    def _norm(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the gains of the last norm, and the epsilon of all norms as a scalar tensor."""
        rows = activation_dtype(dtype, self.device)
        eps = torch.full((), self.config.rms_norm_eps, device=self.device)
        return self.model.norm.weight.to(rows), eps

    def forward(
        self,
        dtype: torch.dtype,
        ids_BT: Tensor,
        positions_BT: Tensor,
        *,
        lengths: Sequence[int] | None = None,
        aux_layers: Sequence[int] = (),
        recompute: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return `HiddenStates.final` and `.aux_layers` of whole sequences, as rows (B * T, ...).

        It computes in `dtype` and packs the weights of each layer just before the layer runs
        (`Layer`). The results equal those of `PackedDecoder.forward` bit for bit.
        """
        norm, eps = self._norm(dtype)
        check_pass(self.config, dtype, ids_BT, positions_BT, lengths=lengths, aux_layers=aux_layers)
        states = run_layers(
            [partial(layer, self.config, dtype) for layer in self.layers],
            self.model.embed_tokens.weight.to(norm.dtype),
            norm,
            eps,
            ids_BT,
            start_pass(positions_BT, self.config, dtype, eps, None, lengths),
            aux_layers=aux_layers,
            recompute=recompute,
        )
        return states.final, states.aux_layers


@dataclass(frozen=True, slots=True)
class PackedDecoder:
    """Weights in compute form, and the forward pass over them."""

    config: ModelConfig
    embedding: Tensor
    layers: list[PackedLayer]
    norm: Tensor
    eps: Tensor
    """Of every norm, a scalar in fp32."""
    fused: CpuLayers | None
    """All layers and the norm as one kernel call without gradients; None if not supported."""
    lm_head: PackedLinear

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of hidden states."""
        return self.embedding.dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the factors of matrix products, and of keys and values."""
        return self.lm_head.weight.dtype

    @property
    def head(self) -> tuple[Tensor, PackedLinear]:
        """The LM head: its weight (V, D), and the layer that maps final states to logits."""
        return self.lm_head.weight, self.lm_head

    @property
    def row_multiple(self) -> int:
        """In exact mode, B * T of a forward pass must be a multiple of this."""
        return row_multiple(self.dtype, self.embedding.device)

    def forward(
        self,
        ids_BT: Tensor,
        positions_BT: Tensor,
        *,
        kv_cache: KVCache | KeyPlaces | None = None,
        lengths: Sequence[int] | None = None,
        shared: SharedRows | None = None,
        aux_layers: Sequence[int] = (),
        recompute: bool = False,
    ) -> HiddenStates:
        """Return the hidden states of `ids_BT` (int64) at `positions_BT`.

        Without a cache, each sequence attends to itself: positions must be 0 .. T-1, and padding
        goes on the right, where the causal mask hides it. If `supports_varlen` is true, sequences
        may be concatenated without padding instead: B is 1, `lengths` add up to T, and positions
        start at 0 in each sequence.

        With gradients, `shared` saves the time for tokens that sequences of `lengths` begin with in
        common. It does not change the states.

        With a cache, the pass stores its keys and values in the cache and attends to earlier ones.
        The cache is a `KeyPlaces` if `supports_varlen` is true, else a `KVCache`.

        In exact mode B * T must be a multiple of `row_multiple`. `aux_layers` are the layers, in
        ascending order, whose inputs the result includes. `recompute` trades time for memory in
        the backward pass (gradient checkpointing).

        Raises:
            IndexError: there is no cache, and a position is beyond `ModelConfig.context_limit`.
            ValueError: `lengths` do not match the tokens or are not supported here; `kv_cache` is
                of the wrong kind; `shared` does not match the sequences; or `aux_layers` are not
                layers in ascending order.
        """
        check_pass(
            self.config,
            self.compute_dtype,
            ids_BT,
            positions_BT,
            lengths=lengths,
            aux_layers=aux_layers,
            cached=kv_cache is not None,
        )
        B = len(ids_BT)
        kernels = has_kernels(self.dtype, ids_BT.device)
        if self.fused is not None and kernels and not torch.is_grad_enabled():
            places = _places(kv_cache)
            x = F.embedding(ids_BT.flatten(), self.embedding)
            return HiddenStates(
                *self.fused(x, positions_BT, places, lengths, aux_layers=aux_layers)
            ).in_sequences(B)
        attention: Attention = start_pass(
            positions_BT, self.config, self.compute_dtype, self.eps, kv_cache, lengths
        )
        if shared is not None:
            if lengths is None or shared.total != ids_BT.shape[1]:
                raise ValueError(f"shared rows of {shared.total} tokens do not match the sequences")
            attention = _SharedAttention(attention, shared)
            ids_BT = shared.computed_of(ids_BT.T).T
        states = run_layers(
            [partial(_run_packed, layer) for layer in self.layers],
            self.embedding,
            self.norm,
            self.eps,
            ids_BT,
            attention,
            aux_layers=aux_layers,
            recompute=recompute,
        )
        return (states if shared is None else states.all_of(shared)).in_sequences(B)


@dataclass(frozen=True, slots=True)
class _SharedAttention:
    """Attention over whole sequences for computed rows."""

    attention: Attention
    shared: SharedRows

    def __call__(self, index: int, qkv: Tensor, norms: Tensor | None, bounded: bool) -> Tensor:
        """As `Attention`, from computed rows to computed rows."""
        mixed = self.attention(index, self.shared.all_of(qkv), norms, bounded)
        return self.shared.computed_of(mixed)


def check_pass(
    config: ModelConfig,
    dtype: torch.dtype,
    ids_BT: Tensor,
    positions_BT: Tensor,
    *,
    lengths: Sequence[int] | None,
    aux_layers: Sequence[int],
    cached: bool = False,
) -> None:
    """Raise the errors that `PackedDecoder.forward` documents for its arguments."""
    if lengths is not None:
        possible = supports_varlen(config, dtype, ids_BT.device) and not cached
        if not possible or ids_BT.shape != (1, sum(lengths)) or min(lengths) < 1:
            raise ValueError(
                f"lengths={list(lengths)} do not add up to tokens of shape {tuple(ids_BT.shape)}, "
                f"or {dtype} on {ids_BT.device} does not support sequences without padding; pad "
                "them and leave lengths=None"
            )
    if not cached:
        limit = config.context_limit
        if int(positions_BT.max()) >= limit.tokens:
            # The kernels read the rotation tables by address, without a bounds check.
            raise IndexError(f"position {int(positions_BT.max())}: {limit.reason}")
    if aux_layers and not (
        0 <= aux_layers[0] <= aux_layers[-1] < config.num_layers and _increasing(aux_layers)
    ):
        raise ValueError(
            f"auxiliary layers {list(aux_layers)} must be ascending indices of "
            f"{config.num_layers} layers"
        )


class RunLayer(Protocol):
    """A function that runs one layer over rows (M, D), as `layer_forward` does."""

    def __call__(
        self,
        index: int,
        x_MD: Tensor,
        delta_MD: Tensor | None,
        attention: Attention,
        eps: Tensor,
        recompute: bool,
    ) -> tuple[Tensor, Tensor]: ...


def _run_packed(
    w: PackedLayer,
    index: int,
    x_MD: Tensor,
    delta_MD: Tensor | None,
    attention: Attention,
    eps: Tensor,
    recompute: bool,
) -> tuple[Tensor, Tensor]:
    return _run(recompute, layer_forward, w, index, x_MD, delta_MD, attention, eps)


def _run(
    recompute: bool, function: Callable[..., tuple[Tensor, Tensor]], *arguments: object
) -> tuple[Tensor, Tensor]:
    """Call `function`. With `recompute`, keep only its arguments for the backward pass."""
    if not recompute:
        return function(*arguments)
    result = checkpoint(function, *arguments, use_reentrant=False)
    assert isinstance(result, tuple)
    return result


def run_layers(
    layers: Sequence[RunLayer],
    embedding: Tensor,
    norm: Tensor,
    eps: Tensor,
    ids_BT: Tensor,
    attention: Attention,
    *,
    aux_layers: Sequence[int],
    recompute: bool,
) -> HiddenStates:
    """Run a forward pass layer by layer and return its states as rows (B * T, ...).

    Differentiable.
    """
    aux_inputs: list[Tensor] = []
    # Flat once, because each product would flatten its input again, which is slow for few rows.
    x = F.embedding(ids_BT.flatten(), embedding)
    delta: Tensor | None = None
    for index, layer in enumerate(layers):
        if index in aux_layers:
            with torch.no_grad():
                aux_inputs.append(x.detach() if delta is None else x + delta)
        x, delta = layer(index, x, delta, attention, eps, recompute)
    _, final = add_norm(x, delta, norm, eps)
    return HiddenStates(final, torch.cat(aux_inputs, -1) if aux_layers else None)


def _increasing(numbers: Sequence[int]) -> bool:
    return all(a < b for a, b in pairwise(numbers))


def supports_varlen(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether one forward pass can hold sequences of different lengths without padding.

    This needs the compiled attention kernels, which compute each row independently.
    """
    return has_kernels(activation_dtype(dtype, device), device) and supports_attention(
        config, dtype
    )


def _places(kv_cache: KVCache | KeyPlaces | None) -> KeyPlaces | None:
    """Return the locations that the kernels use for a cache, or None without a cache."""
    if kv_cache is None or isinstance(kv_cache, KeyPlaces):
        return kv_cache
    raise ValueError(
        "the compiled kernels need a KeyPlaces as kv_cache, not a KVCache of torch's operations"
    )


def start_pass(
    positions_BT: Tensor,
    config: ModelConfig,
    dtype: torch.dtype,
    eps: Tensor,
    kv_cache: KVCache | KeyPlaces | None = None,
    lengths: Sequence[int] | None = None,
) -> Attention:
    """Return the attention of one forward pass for queries at `positions_BT`.

    Arguments are as in `PackedDecoder.forward`. Raises ValueError if `kv_cache` is of the
    wrong kind.
    """
    rows = activation_dtype(dtype, positions_BT.device)
    if supports_varlen(config, dtype, positions_BT.device):
        return CpuAttention(config, eps, positions_BT, dtype, _places(kv_cache), lengths)
    if isinstance(kv_cache, KeyPlaces):
        raise ValueError(
            f"a KeyPlaces as kv_cache needs the compiled kernels, and torch computes {dtype} on "
            f"{positions_BT.device}; pass a KV cache"
        )
    return TorchAttention(config, eps, positions_BT, rows, kv_cache)


def layer_forward(
    w: PackedLayer,
    index: int,
    x_MD: Tensor,
    delta_MD: Tensor | None,
    attention: Attention,
    eps: Tensor,
) -> tuple[Tensor, Tensor]:
    """Run one layer over rows (M, D); `index` is its number in the cache.

    The residual stream comes and goes as two summands, x and delta. The next norm adds them.
    """
    if w.input_norm is None:
        x_MD = normed = x_MD if delta_MD is None else x_MD + delta_MD
    else:
        x_MD, normed = add_norm(x_MD, delta_MD, w.input_norm, eps)
    return layer_between(w, index, x_MD, normed, attention, eps)


def layer_between(
    w: PackedLayer,
    index: int,
    x_MD: Tensor,
    qkv_input_ME: Tensor,
    attention: Attention,
    eps: Tensor,
) -> tuple[Tensor, Tensor]:
    """Run `layer_forward` from the q, k and v projections on.

    `qkv_input_ME` is the input of these projections, of width E. `x_MD` is the residual stream.
    """
    mixed = attention(index, w.qkv(qkv_input_ME), w.qk_norm, w.bounded_scores)
    x_MD, normed = add_norm(x_MD, w.out(mixed), w.post_norm, eps)
    return x_MD, w.down(gated(w.gate_up(normed)))
