"""What every draft head is: drafts of several tokens in a row from the policy's features.

    taken(features) -> state;  state, next token -> one decoder layer -> state -> logits

A state takes the place of a feature from the second draft on. Heads differ in what they take from
the policy, in what goes into the layer, and in how logits come of a state (`draft_head`: EAGLE-1
and 2; `draft_head3`: EAGLE-3); training, acceptance, drafting and files are the same. Knows nothing
of sampling, requests or losses. Shapes as in `decoder`; F width of a feature, Z draft vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.models.config import ModelConfig
from slipstream.models.cpu_attention import ChainKeys, CpuAttention
from slipstream.models.cpu_layers import CpuLayers, suits
from slipstream.models.decoder import (
    Attention,
    Decoder,
    PackedLayer,
    layer_between,
    takes_sequences_in_a_row,
)
from slipstream.models.functional import rms_norm, rope_at, rotate
from slipstream.models.linear import PackedLinear
from slipstream.models.numerics import activation_dtype, has_kernels


class DraftModel(nn.Module, ABC):
    """The parameters of a head: one decoder layer with what is around it."""

    algorithm: str
    """Its name among SGLang's algorithms."""
    aux_layers: tuple[int, ...]
    """Layers of the policy whose inputs, side by side, are its features; none: the policy's final
    hidden states are."""
    tokens: tuple[int, ...] | None = None
    """Those that it can draft, in order; None: all."""

    def __init__(self, config: ModelConfig) -> None:
        """`config` has the sizes of the layer, and the policy's number of layers."""
        super().__init__()
        self.config = config
        self.fc: nn.Linear

    @abstractmethod
    def init_weights(self, seed: int, policy: Decoder | None = None) -> None:
        """The weights that training begins with; where the `policy` is at hand, from its own."""

    @abstractmethod
    def pack(self, dtype: torch.dtype) -> PackedDraft:
        """Weights as the forward pass uses them. Differentiable."""

    @abstractmethod
    def blank(self) -> Self:
        """Another one of the same shape, without weights that mean anything."""

    def is_like(self, other: DraftModel) -> bool:
        """Whether the weights of one mean in the other what they mean here."""
        return (self.algorithm, self.aux_layers, self.tokens) == (
            other.algorithm,
            other.aux_layers,
            other.tokens,
        )

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedDraft(ABC):
    """Weights in compute form, and the forward pass over them."""

    config: ModelConfig
    fc: PackedLinear
    layer: PackedLayer
    eps: Tensor
    together: CpuLayers | None
    """The layer in one call, without gradients."""

    @property
    def dtype(self) -> torch.dtype:
        """What is computed in."""
        return self.fc.weight.dtype

    @property
    def tokens(self) -> Tensor | None:
        """Tokens (Z,) that can be drafted, in order; None: all."""
        return None

    @property
    def state_norms(self) -> tuple[Tensor | None, Tensor | None]:
        """Weights (D,) of a state's norm before the layer and before the LM head; None: none."""
        return None, None

    @property
    def own_lm_head(self) -> PackedLinear | None:
        """In the place of the policy's, of the tokens that can be drafted."""
        return None

    @property
    def predicts_features(self) -> bool:
        """Whether a state is meant to be the policy's final hidden state one token on."""
        return False

    @abstractmethod
    def taken(self, features: Tensor) -> Tensor:
        """States (..., D) in the place of true features (..., F)."""

    @abstractmethod
    def enter(
        self, ids_BT: Tensor, states_BTD: Tensor, embedding_VD: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """What the layer adds to, (B * T, D), and what its queries, keys and values are made of,
        where that is something else: of tokens, each with the state before it."""

    @abstractmethod
    def draft_logits(self, states_MD: Tensor, lm_head: PackedLinear) -> Tensor:
        """Logits (M, Z) of the token after next; `lm_head` is the policy's."""

    def logits(self, states_MD: Tensor, lm_head: PackedLinear) -> Tensor:
        """Logits (M, V) in fp32 over the policy's vocabulary; -inf where nothing is drafted."""
        own = self.draft_logits(states_MD, lm_head).float()
        if self.tokens is None:
            return own
        wide = own.new_full((len(own), self.config.vocab_size), -inf)
        return wide.index_copy_(1, self.tokens, own)

    def unroll(
        self,
        next_ids_BT: Tensor,
        features_BTF: Tensor,
        embedding_VD: Tensor,
        steps: int,
        *,
        lengths: Sequence[int] | None = None,
    ) -> Iterator[Tensor]:
        """Chains of drafts from every slot at once, along the true tokens: `steps` tensors
        (B, T, D), of which entry t of number k is the state that drafts token t + 2 + k.

        Number 0 is given true features. Each later one is given the state before it in place of
        a true feature, and sees what an engine's draft sees: the true slots up to t, and
        those of its own chain (the training-time test of EAGLE-3, Li et al. 2025). What lies past
        the end of the tokens means nothing. Padding goes on the right; with `lengths` the
        sequences stand one after another instead (`PackedDecoder.forward`).

        Raises:
            ValueError: `lengths` where they cannot be.
        """
        B, T = next_ids_BT.shape
        dtype, device = self.dtype, features_BTF.device
        by_kernels = takes_sequences_in_a_row(self.config, dtype, device)
        if lengths is not None and (B != 1 or sum(lengths) != T or min(lengths) < 1):
            raise ValueError(f"sequences of {list(lengths)} tokens in a row are not {B} x {T}")
        chains: Attention
        if by_kernels:
            given = [T] * B if lengths is None else lengths
            chains = _KernelChains(self.config, self.eps, given, dtype)
        elif lengths is not None:
            raise ValueError("here sequences are computed with padding only")
        else:
            chains = _Chains(self.config, self.eps, T, features_BTF.dtype, device)
        ids, states_BTD = next_ids_BT, self.taken(features_BTF)
        for step in range(steps):
            if step:
                ids = F.pad(ids[:, 1:], (0, 1))
            states_BTD = self.step(ids, states_BTD, embedding_VD, chains).view(B, T, -1)
            yield states_BTD

    def step(
        self, ids_BT: Tensor, states_BTD: Tensor, embedding_VD: Tensor, attention: Attention
    ) -> Tensor:
        """The next states (B * T, D)."""
        x, given = self.enter(ids_BT, states_BTD, embedding_VD)
        x, delta = layer_between(
            self.layer, 0, x, x if given is None else given, attention, self.eps
        )
        return x + delta


def one_call(layer: PackedLayer, config: ModelConfig, eps: Tensor) -> CpuLayers | None:
    """`PackedDraft.together` for a layer; None where there are no kernels for it."""
    dtype, device = layer.qkv.weight.dtype, eps.device
    if has_kernels(activation_dtype(dtype, device), device) and suits(config, dtype):
        return CpuLayers([layer], config, eps, None)
    return None


class _KernelChains:
    """What `_Chains` is, by compiled kernels, over sequences of any lengths one after another."""

    def __init__(
        self, config: ModelConfig, eps: Tensor, lengths: Sequence[int], dtype: torch.dtype
    ) -> None:
        self._c, self._eps = config, eps
        places = torch.cat([torch.arange(length) for length in lengths])
        # Of padding: kernels read tables by address.
        self._positions = places.clamp(max=config.max_position_embeddings - 1)
        self._attention = CpuAttention(config, eps, self._positions[None], dtype, lengths=lengths)
        self._room = self._attention.own_room()
        self._true: Tensor | None = None
        # Of each later step so far: (M, H, K).
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def __call__(self, index: int, qkv: Tensor, norms: Tensor | None, bounded: bool) -> Tensor:
        if self._true is None:
            self._true = qkv
            return self._attention.keeping(qkv, norms, self._room)
        c, M = self._c, len(qkv)
        Q, H, G, K = c.num_heads, c.num_kv_heads, c.group_size, c.head_dim
        places = self._positions + (1 + len(self._keys))
        places = places.clamp(max=c.max_position_embeddings - 1)
        qk, v = qkv.view(1, M, Q + 2 * H, K).split_with_sizes([Q + H, H], 2)
        if norms is not None:
            qk = rms_norm(qk, norms, self._eps)
        cos, sin = rope_at(places[None], c, qkv.dtype)
        q, k = rotate(qk, cos, sin).split_with_sizes([Q, H], 2)
        self._keys.append(k.view(M, H, K))
        self._values.append(v.reshape(M, H, K))
        keys, values = torch.stack(self._keys), torch.stack(self._values)
        chain = ChainKeys(places, q.view(M, H, G, K) * K**-0.5, keys, values)
        return self._attention.chained(qkv, norms, self._true, self._room, chain)


class _Chains:
    """`Attention` of `unroll`, one step after the other: a slot sees the true slots up to itself,
    and of later steps those of its own chain alone, which are a score each, not a row of scores.
    """

    def __init__(
        self,
        config: ModelConfig,
        eps: Tensor,
        length: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._c, self._eps, self._dtype = config, eps, dtype
        self._positions = torch.arange(length, device=device)
        self._unseen = self._positions > self._positions[:, None]
        # Of each step so far: (B, H, T, K).
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def __call__(self, index: int, qkv: Tensor, norms: Tensor | None, bounded: bool) -> Tensor:
        c, T = self._c, len(self._positions)
        Q, H, G, K = c.num_heads, c.num_kv_heads, c.group_size, c.head_dim
        places = self._positions + len(self._keys)
        cos, sin = rope_at(places.clamp(max=c.max_position_embeddings - 1)[None], c, self._dtype)
        qk, v = qkv.view(-1, T, Q + 2 * H, K).split_with_sizes([Q + H, H], 2)
        if norms is not None:
            qk = rms_norm(qk, norms, self._eps)
        q, k = rotate(qk, cos, sin).split_with_sizes([Q, H], 2)
        q = q.view(-1, T, H, G, K).permute(0, 2, 3, 1, 4) * K**-0.5
        self._keys.append(k.transpose(1, 2))
        self._values.append(v.transpose(1, 2))
        rows = q.flatten(2, 3) @ self._keys[0].transpose(-1, -2)
        scores = rows.view(-1, H, G, T, T).float().masked_fill(self._unseen, -inf)
        own = [(q * key[:, :, None]).sum(-1, keepdim=True).float() for key in self._keys[1:]]
        weights = torch.softmax(torch.cat([scores, *own], -1), -1).to(v.dtype)
        out = (weights[..., :T].flatten(2, 3) @ self._values[0]).view_as(q)
        for step, value in enumerate(self._values[1:]):
            out = out + weights[..., T + step, None] * value[:, :, None]
        return out.permute(0, 3, 1, 2, 4).reshape(-1, Q * K)
