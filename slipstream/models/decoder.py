"""The decoder: token ids to hidden states. Qwen2, Qwen3, Llama, Mistral: one readable form.

`Decoder` owns the parameters under their Hugging Face names (fp32 master weights when it trains).
`Decoder.pack` turns them into a `PackedDecoder`: matrices cast to the compute dtype, the rest to
that of activations (`numerics.activation_dtype`), q|k|v and gate|up concatenated. The forward pass
is a function of the packed weights alone, so the trainer (which packs with gradients, once per
micro-batch) and the engine (once per weight update) run the same operations on the same shapes. It
does not know about sampling, losses, log-probs or batching.

Shapes: B sequences, T tokens, M = B * T rows, D hidden width, H key-value heads, G query heads per
key-value head, K head width, S key slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from slipstream.models.cpu_attention import CpuAttention, KeyPlaces, attends
from slipstream.models.cpu_layers import CpuLayers, suits
from slipstream.models.functional import add_norm, gated
from slipstream.models.linear import PackedLinear
from slipstream.models.numerics import activation_dtype, has_kernels, row_multiple


class PlacedKVCache(KVCache, Protocol):
    """A cache for any device: compiled kernels go to its keys and values by their places, torch's
    operations by what `KVCache` gives."""

    def places(self) -> KeyPlaces:
        """Where keys and values of this pass's rows lie."""
        ...


class Attention(Protocol):
    """Attention of one forward pass, all layers."""

    def __call__(self, index: int, qkv: Tensor, norms: Tensor | None, bounded: bool) -> Tensor:
        """From the joined projections (M, (Q + 2H) * K) of layer `index` to the mixed values
        (M, Q * K). `norms` and `bounded`: `PackedLayer.qk_norm`, `.bounded_scores`."""
        ...


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """What a forward pass yields.

    `final` (B, T, D) has gone through the last norm: the input of every head. `aux_layers` (B, T,
    n * D)
    are, side by side, the inputs of the n layers that were asked for, before any norm (EAGLE-3's
    features), without gradients; None where none was.
    """

    final: Tensor
    aux_layers: Tensor | None

    def side_by_side(self) -> Tensor:
        """The auxiliary layers, if there are any, and then the final ones: (B, T, (n + 1) * D)."""
        return (
            self.final if self.aux_layers is None else torch.cat([self.aux_layers, self.final], -1)
        )

    @property
    def features(self) -> Tensor:
        """The input of a draft head: auxiliary layers if there are any, else final states."""
        return self.final if self.aux_layers is None else self.aux_layers

    def at(self, row: int) -> Tensor:
        """A copy of one of `flat` rows, side by side (F,)."""
        final = self.final[row]
        return (
            final.clone() if self.aux_layers is None else torch.cat([self.aux_layers[row], final])
        )

    @classmethod
    def split(cls, states: Tensor, width: int) -> HiddenStates:
        """What `side_by_side` put together, of final states of a width D."""
        if states.shape[-1] == width:
            return cls(states, None)
        return cls(states[..., -width:], states[..., :-width])

    def flat(self) -> HiddenStates:
        """Rows (B * T, ...) instead of sequences."""
        aux_layers = self.aux_layers
        return HiddenStates(
            self.final.flatten(0, 1), None if aux_layers is None else aux_layers.flatten(0, 1)
        )

    def in_sequences(self, count: int) -> HiddenStates:
        """`count` sequences (B, T, ...) instead of rows."""
        aux_layers = self.aux_layers
        return HiddenStates(
            self.final.view(count, -1, self.final.shape[-1]),
            None if aux_layers is None else aux_layers.view(count, -1, aux_layers.shape[-1]),
        )


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
    gate_up: PackedLinear
    down: PackedLinear


class _Attention(nn.Module):
    def __init__(self, c: ModelConfig, inputs: int) -> None:
        super().__init__()
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.q_proj = nn.Linear(inputs, q, bias=c.attention_bias)
        self.k_proj = nn.Linear(inputs, kv, bias=c.attention_bias)
        self.v_proj = nn.Linear(inputs, kv, bias=c.attention_bias)
        self.o_proj = nn.Linear(q, c.hidden_size, bias=False)
        if c.qk_norm:
            self.q_norm = Norm(c.head_dim)
            self.k_norm = Norm(c.head_dim)


class Norm(nn.Module):
    """The gains of a root-mean-square norm."""

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
    """The parameters of one decoder layer, under their Hugging Face names.

    Called as a module it packs its weights and runs: how FSDP2 gathers them just for that
    (`models.sharded`). Elsewhere layers are packed ahead, all together.
    """

    def __init__(
        self, c: ModelConfig, *, input_norm: bool = True, inputs: int | None = None
    ) -> None:
        """Queries, keys and values are made of `inputs` numbers; None: of the hidden size."""
        super().__init__()
        self.self_attn = _Attention(c, c.hidden_size if inputs is None else inputs)
        self.mlp = _MLP(c)
        self.input_layernorm = Norm(c.hidden_size) if input_norm else None
        self.post_attention_layernorm = Norm(c.hidden_size)

    def pack(self, c: ModelConfig, dtype: torch.dtype) -> PackedLayer:
        """Weights as `layer_forward` uses them. Differentiable."""
        a, m, first = self.self_attn, self.mlp, self.input_layernorm
        rows = activation_dtype(dtype, self.post_attention_layernorm.weight.device)
        bias = norm = None
        bounded = False
        if c.attention_bias:
            bias = torch.cat([a.q_proj.bias, a.k_proj.bias, a.v_proj.bias]).to(rows)
        if c.qk_norm:
            norm = self.qk_norm(c).to(rows)
            # Of a device's memory the question would be waited for.
            if norm.device.type == "cpu":
                widest = norm.detach().float().abs().amax(-1)
                bound = widest[: c.num_heads].amax() * widest[c.num_heads :].amax()
                # Turning leaves lengths as they are, but for the magnitude of what it turns by.
                turned = c.rope_magnitude**2 * c.head_dim**0.5
                bounded = float(bound) * turned <= SCORE_BOUND
        return PackedLayer(
            input_norm=None if first is None else first.weight.to(rows),
            qkv=PackedLinear.of(
                torch.cat([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight]).to(dtype), bias
            ),
            qk_norm=norm,
            bounded_scores=bounded,
            out=PackedLinear.of(a.o_proj.weight.to(dtype)),
            post_norm=self.post_attention_layernorm.weight.to(rows),
            gate_up=PackedLinear.of(torch.cat([m.gate_proj.weight, m.up_proj.weight]).to(dtype)),
            down=PackedLinear.of(m.down_proj.weight.to(dtype)),
        )

    def qk_norm(self, c: ModelConfig) -> Tensor:
        """(H * G + H, K): see `PackedLayer.qk_norm`."""
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
        """`layer_forward`, with weights that are packed for it and not kept: with `recompute` not
        even for the backward pass."""

        def run(x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
            return layer_forward(self.pack(c, dtype), index, x, delta, attention, eps)

        return _run(recompute, run, x_MD, delta_MD)


class _Trunk(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_layers))
        self.norm = Norm(c.hidden_size)


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

    @property
    def layers(self) -> list[Layer]:
        """From the first to the last."""
        found: list[Layer] = []
        modules: Iterator[nn.Module] = iter(self.model.layers)
        for layer in modules:
            assert isinstance(layer, Layer)
            found.append(layer)
        return found

    def pack(self, dtype: torch.dtype) -> PackedDecoder:
        """Weights as the forward pass uses them. Differentiable with respect to the parameters."""
        packed = [layer.pack(self.config, dtype) for layer in self.layers]
        norm, eps = self._norm(dtype)
        together = None
        if has_kernels(norm.dtype, self.device) and suits(self.config, dtype):
            together = CpuLayers(packed, self.config, eps, norm)
        return PackedDecoder(
            config=self.config,
            embedding=self.model.embed_tokens.weight.to(norm.dtype),
            layers=packed,
            norm=norm,
            eps=eps,
            together=together,
            lm_head=PackedLinear.of(self.lm_head_weight.to(dtype)),
        )

    def _norm(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The last norm's gains, and the epsilon of all norms."""
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
        """`HiddenStates.final` and `.aux_layers` of whole sequences as rows (B * T, ...),
        computing in
        `dtype`; each layer's weights are packed when its turn comes (`Layer`). The numbers are
        those of `PackedDecoder.forward`, to the bit."""
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
    together: CpuLayers | None
    """All layers and the norm in one call, without gradients; None where there is no such call."""
    lm_head: PackedLinear

    @property
    def dtype(self) -> torch.dtype:
        """Of hidden states."""
        return self.embedding.dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of what is multiplied, and of keys and values."""
        return self.lm_head.weight.dtype

    @property
    def head(self) -> tuple[Tensor, PackedLinear]:
        """What makes logits of final states: the weight (V, D), and the product with it."""
        return self.lm_head.weight, self.lm_head

    @property
    def row_multiple(self) -> int:
        """How many tokens the products need at a time to be exact."""
        return row_multiple(self.dtype, self.embedding.device)

    def forward(
        self,
        ids_BT: Tensor,
        positions_BT: Tensor,
        *,
        kv_cache: PlacedKVCache | KeyPlaces | None = None,
        lengths: Sequence[int] | None = None,
        aux_layers: Sequence[int] = (),
        recompute: bool = False,
    ) -> HiddenStates:
        """Hidden states of `ids_BT` (int64) at `positions_BT`.

        Without a cache the sequences stand alone: positions must be 0 .. T-1; pad on the right, the
        causal mask keeps padding unseen. Where the decoder `takes_sequences_in_a_row`, they may
        come so instead, without padding: B is 1, `lengths` add up to T, positions begin at 0 with
        each sequence. With a cache, keys and values are stored in it and earlier ones are attended
        to; where it takes sequences in a row, places of keys will do for one. In exact mode B * T
        must be a multiple of `row_multiple`.
        `aux_layers` are layers, from the first to the last, whose inputs are wanted, too.
        `recompute` trades time for memory in the backward pass (gradient checkpointing).

        Raises:
            IndexError: without a cache, positions beyond `ModelConfig.context_limit`.
            ValueError: `lengths` that are not those of the rows, or of no use here; places where
                no kernel goes to them; auxiliary layers that are no layers, or out of order.
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
        if self.together is not None and kernels and not torch.is_grad_enabled():
            places = _places(kv_cache)
            x = F.embedding(ids_BT.flatten(), self.embedding)
            return HiddenStates(
                *self.together(x, positions_BT, places, lengths, aux_layers=aux_layers)
            ).in_sequences(B)
        attention = start_pass(
            positions_BT, self.config, self.compute_dtype, self.eps, kv_cache, lengths
        )
        return run_layers(
            [partial(_run_packed, layer) for layer in self.layers],
            self.embedding,
            self.norm,
            self.eps,
            ids_BT,
            attention,
            aux_layers=aux_layers,
            recompute=recompute,
        ).in_sequences(B)


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
    """Refuse what `PackedDecoder.forward` says that it refuses."""
    if lengths is not None:
        possible = takes_sequences_in_a_row(config, dtype, ids_BT.device) and not cached
        if not possible or ids_BT.shape != (1, sum(lengths)) or min(lengths) < 1:
            raise ValueError(
                f"sequences of {list(lengths)} tokens in a row do not make {ids_BT.shape}, or "
                "cannot be computed so here"
            )
    if not cached:
        limit = config.context_limit
        if int(positions_BT.max()) >= limit.tokens:
            # Kernels read tables by address.
            raise IndexError(f"position {int(positions_BT.max())}: {limit.reason}")
    if aux_layers and not (
        0 <= aux_layers[0] <= aux_layers[-1] < config.num_layers and _increasing(aux_layers)
    ):
        raise ValueError(f"auxiliary layers {list(aux_layers)} of {config.num_layers} layers")


class RunLayer(Protocol):
    """One layer over rows, as `layer_forward`."""

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
    recompute: bool, work: Callable[..., tuple[Tensor, Tensor]], *given: object
) -> tuple[Tensor, Tensor]:
    """`work`, of which with `recompute` nothing is kept for the backward pass but what is given."""
    if not recompute:
        return work(*given)
    done = checkpoint(work, *given, use_reentrant=False)
    assert isinstance(done, tuple)
    return done


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
    """A forward pass layer by layer, as torch's operations, over rows (B * T, ...);
    differentiable."""
    kept: list[Tensor] = []
    # Rows, not sequences: each product would flatten its input, and few rows make that dear.
    x = F.embedding(ids_BT.flatten(), embedding)
    delta: Tensor | None = None
    for index, layer in enumerate(layers):
        if index in aux_layers:
            with torch.no_grad():
                kept.append(x.detach() if delta is None else x + delta)
        x, delta = layer(index, x, delta, attention, eps, recompute)
    _, final = add_norm(x, delta, norm, eps)
    return HiddenStates(final, torch.cat(kept, -1) if aux_layers else None)


def _increasing(numbers: Sequence[int]) -> bool:
    return all(a < b for a, b in pairwise(numbers))


def takes_sequences_in_a_row(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether sequences of any lengths can go through one forward pass without padding: where
    compiled kernels attend, each row by itself."""
    return has_kernels(activation_dtype(dtype, device), device) and attends(config, dtype)


def _places(kv_cache: PlacedKVCache | KeyPlaces | None) -> KeyPlaces | None:
    """Where kernels go."""
    if kv_cache is None or isinstance(kv_cache, KeyPlaces):
        return kv_cache
    return kv_cache.places()


def start_pass(
    positions_BT: Tensor,
    config: ModelConfig,
    dtype: torch.dtype,
    eps: Tensor,
    kv_cache: PlacedKVCache | KeyPlaces | None = None,
    lengths: Sequence[int] | None = None,
) -> Attention:
    """Attention for queries at `positions_BT`; see `PackedDecoder.forward`."""
    rows = activation_dtype(dtype, positions_BT.device)
    if takes_sequences_in_a_row(config, dtype, positions_BT.device):
        return CpuAttention(config, eps, positions_BT, dtype, _places(kv_cache), lengths)
    if isinstance(kv_cache, KeyPlaces):
        raise ValueError("places of keys are for compiled kernels, and here torch computes")
    return TorchAttention(config, eps, positions_BT, rows, kv_cache)


def layer_forward(
    w: PackedLayer,
    index: int,
    x_MD: Tensor,
    delta_MD: Tensor | None,
    attention: Attention,
    eps: Tensor,
) -> tuple[Tensor, Tensor]:
    """One layer over rows (M, D); `index` is its place in the cache. Takes and returns the residual
    stream as two summands: the next norm adds them."""
    if w.input_norm is None:
        x_MD = normed = x_MD if delta_MD is None else x_MD + delta_MD
    else:
        x_MD, normed = add_norm(x_MD, delta_MD, w.input_norm, eps)
    return layer_between(w, index, x_MD, normed, attention, eps)


def layer_between(
    w: PackedLayer,
    index: int,
    x_MD: Tensor,
    given_ME: Tensor,
    attention: Attention,
    eps: Tensor,
) -> tuple[Tensor, Tensor]:
    """`layer_forward` after the first norm: `given_ME` is what queries, keys and values are made
    of, `x_MD` what the layer adds to."""
    mixed = attention(index, w.qkv(given_ME), w.qk_norm, w.bounded_scores)
    x_MD, normed = add_norm(x_MD, w.out(mixed), w.post_norm, eps)
    return x_MD, w.down(gated(w.gate_up(normed)))
