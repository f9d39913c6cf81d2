"""EAGLE-1/2 draft head: from the policy's feature at one position to its feature at the next.

    slot t:  fc([embedding of token t+1 ; feature of token t]) -> one decoder layer -> feature t+1

Features are the policy's final hidden states, after its last norm, so the policy's own LM head
turns a predicted feature into a distribution of token t+2. Fed back in place of the true feature,
the prediction goes one token further (Li et al. 2024, EAGLE and EAGLE-2). Embedding and LM head are
the policy's, passed in at each use: a copy would grow stale while the policy learns.

The layer has the policy's shape and family, without an input norm. Names are those of published
EAGLE heads (`fc.weight`, `layers.0.self_attn.q_proj.weight`, ...). Knows nothing of sampling,
requests or training. Shapes as in `decoder`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.models.config import ModelConfig
from slipstream.models.cpu_attention import ChainKeys, CpuAttention
from slipstream.models.cpu_layers import CpuLayers, suits
from slipstream.models.decoder import (
    Attention,
    Layer,
    PackedLayer,
    init_parameters,
    layer_forward,
    takes_sequences_in_a_row,
)
from slipstream.models.functional import rms_norm, rope_at, rotate
from slipstream.models.linear import PackedLinear
from slipstream.models.numerics import activation_dtype, has_kernels


class DraftHead(nn.Module):
    """The parameters: `fc` (D, 2D) and one layer."""

    def __init__(self, config: ModelConfig) -> None:
        """`config` of the policy that the head drafts for."""
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([Layer(config, input_norm=False)])

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """At first the head hands on the feature it is given, plus a little noise.

        A head that begins as the identity drafts the token after next as if it were the next; from
        there training is short.
        """
        init_parameters(self, self.config.initializer_range, 1, seed)
        D = self.config.hidden_size
        self.fc.weight[:, D:] += torch.eye(D)

    def pack(self, dtype: torch.dtype) -> PackedDraftHead:
        """Weights as the forward pass uses them. Differentiable."""
        (layer,) = self.layers
        assert isinstance(layer, Layer)
        packed = layer.pack(self.config, dtype)
        device = self.fc.weight.device
        eps = torch.full((), self.config.rms_norm_eps, device=device)
        together = None
        if has_kernels(activation_dtype(dtype, device), device) and suits(self.config, dtype):
            together = CpuLayers([packed], self.config, eps, None)
        return PackedDraftHead(
            config=self.config,
            fc=PackedLinear.of(self.fc.weight.to(dtype)),
            layer=packed,
            eps=eps,
            together=together,
        )


@dataclass(frozen=True, slots=True)
class PackedDraftHead:
    """Weights in compute form, and the forward pass over them."""

    config: ModelConfig
    fc: PackedLinear
    layer: PackedLayer
    eps: Tensor
    together: CpuLayers | None
    """The layer in one call, without gradients."""

    def unroll(
        self,
        next_ids_BT: Tensor,
        features_BTD: Tensor,
        embedding_VD: Tensor,
        steps: int,
        *,
        lengths: Sequence[int] | None = None,
    ) -> Iterator[Tensor]:
        """Chains of drafts from every slot at once, along the true tokens: `steps` tensors
        (B, T, D), of which entry t of number k is the feature k + 1 after that of slot t.

        Number 0 is given true features. Each later one is given the prediction before it in
        place of a true feature, and sees what an engine's draft sees: the true slots up to t, and
        those of its own chain (the training-time test of EAGLE-3, Li et al. 2025). What lies past
        the end of the tokens means nothing. Padding goes on the right; with `lengths` the
        sequences stand one after another instead (`PackedDecoder.forward`).

        Raises:
            ValueError: `lengths` where they cannot be.
        """
        B, T = next_ids_BT.shape
        dtype, device = self.fc.weight.dtype, features_BTD.device
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
            chains = _Chains(self.config, self.eps, T, features_BTD.dtype, device)
        ids, x_BTD = next_ids_BT, features_BTD
        for step in range(steps):
            if step:
                ids = F.pad(ids[:, 1:], (0, 1))
            x = self.join(ids, x_BTD, embedding_VD)
            x, delta = layer_forward(self.layer, 0, x, None, chains, self.eps)
            x_BTD = (x + delta).view(B, T, -1)
            yield x_BTD

    def join(self, ids_BT: Tensor, features_BTD: Tensor, embedding_VD: Tensor) -> Tensor:
        """What the layer is given, (B * T, D): tokens, each with the feature before it."""
        embedded = F.embedding(ids_BT.flatten(), embedding_VD)
        return self.fc(torch.cat([embedded, features_BTD.reshape(len(embedded), -1)], dim=-1))


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
