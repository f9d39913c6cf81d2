"""The common interface of all draft heads, which draft several tokens from the policy's features.

    to_states(features) -> state;  state, next token -> one decoder layer -> state -> logits

From the second draft token on, the head's own state replaces a feature. Heads differ in three
respects: which features they read, what goes into the layer, and how a state becomes logits
(`eagle1`: EAGLE-1 and 2; `eagle3`: EAGLE-3). Training, acceptance, drafting and files are the same.
This module knows nothing of sampling, requests or losses.

Shapes as in `models.decoder`; F width of a feature, Z draft vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.errors import ConfigError
from slipstream.models.config import ModelConfig
from slipstream.models.cpu_attention import ChainKeys, CpuAttention
from slipstream.models.cpu_layers import CpuLayers, supports_layers
from slipstream.models.decoder import (
    Attention,
    Decoder,
    PackedLayer,
    layer_between,
    supports_varlen,
)
from slipstream.models.functional import rms_norm, rope_at, rotate
from slipstream.models.linear import PackedLinear
from slipstream.models.numerics import activation_dtype, has_kernels

DRAFT_TOKENS = "draft_tokens"
"""The name of the draft vocabulary among the weights of a head."""


class DraftModel(nn.Module, ABC):
    """The parameters of a draft head: one decoder layer, its input projection and its output."""

    algorithm: str
    """The name of the algorithm in SGLang."""
    aux_layers: tuple[int, ...]
    """Layers of the policy whose inputs, concatenated, are the features. If empty, the features are
    the policy's final hidden states."""
    draft_tokens: Tensor | None
    """The draft vocabulary (Z,), int64 in ascending order, a buffer; None: all tokens."""

    def __init__(self, config: ModelConfig, tokens: Sequence[int] | None = None) -> None:
        """`config` has the sizes of the head's layer, and the policy's number of layers.

        `tokens` is the draft vocabulary; None: all tokens. Raises ConfigError unless these are
        token ids of the policy in ascending order.
        """
        super().__init__()
        self.config = config
        self.fc: nn.Linear
        if tokens is not None:
            check_tokens(tokens, config.vocab_size)
        self.register_buffer(DRAFT_TOKENS, None if tokens is None else torch.tensor(tokens))

    @abstractmethod
    def init_weights(self, seed: int, policy: Decoder | None = None) -> None:
        """Initialize the weights for training, in part from the `policy` if it is given."""

    @abstractmethod
    def pack(self, dtype: torch.dtype) -> PackedDraft:
        """Return the weights in compute form. Differentiable."""

    @abstractmethod
    def blank(self) -> Self:
        """Return an uninitialized head of the same shape."""

    def copy(self) -> Self:
        """Return a head with the same weights on the same device."""
        made = self.blank().to(self.device)
        made.load_state_dict(self.state_dict())
        return made

    @property
    def tokens(self) -> tuple[int, ...] | None:
        """The draft vocabulary in ascending order; None: all tokens."""
        return None if self.draft_tokens is None else tuple(self.draft_tokens.tolist())

    def set_tokens(self, tokens: Tensor) -> None:
        """Replace the draft vocabulary by `tokens` (Z,), int64 in ascending order.

        The size of an EAGLE-3 head stays, because its LM head has a row for each token. The caller
        checks the tokens (`check_tokens`).
        """
        assert self.draft_tokens is not None
        assert self.algorithm == "EAGLE" or len(tokens) == self.draft_vocab_size
        self.draft_tokens = tokens.detach().to(self.device, copy=True)

    @property
    def draft_vocab_size(self) -> int:
        """Z, the number of tokens that the head can draft."""
        return self.config.vocab_size if self.draft_tokens is None else len(self.draft_tokens)

    def is_like(self, other: DraftModel) -> bool:
        """Return whether the weights of one head can be used in the other."""
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
    """A draft head in compute form, with its forward pass."""

    config: ModelConfig
    fc: PackedLinear
    layer: PackedLayer
    eps: Tensor
    fused: CpuLayers | None
    """The layer as one kernel call without gradients; None if the kernels do not support it."""
    tokens: Tensor | None
    """The draft vocabulary (Z,) in ascending order; None: all tokens."""

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        return self.fc.weight.dtype

    @property
    def state_norms(self) -> tuple[Tensor | None, Tensor | None]:
        """The gains (D,) of a state's norms before the layer and before the LM head, or None."""
        return None, None

    @property
    def predicts_features(self) -> bool:
        """Whether a state should approximate the policy's final hidden state one token later."""
        return False

    @abstractmethod
    def to_states(self, features: Tensor) -> Tensor:
        """Return the states (..., D) for the policy's features (..., F)."""

    @abstractmethod
    def layer_inputs(
        self, ids_BT: Tensor, states_BTD: Tensor, embedding_VD: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the layer's input for tokens, each with the state before it.

        The first result is the residual stream (B * T, D). The second is the input (B * T, E) of
        the q, k and v projections, or None if it is the residual stream, too.
        """

    @abstractmethod
    def draft_lm_head(self, lm_head: PackedLinear) -> PackedLinear:
        """Return the LM head over the draft vocabulary; `lm_head` is the policy's."""

    @abstractmethod
    def draft_logits(self, states_MD: Tensor, draft_lm_head: PackedLinear) -> Tensor:
        """Return logits (M, Z) of the token after next, with the result of `draft_lm_head`."""

    def logits(self, states_MD: Tensor, draft_lm_head: PackedLinear) -> Tensor:
        """Return logits (M, V) in fp32 over the policy's vocabulary.

        Tokens outside the draft vocabulary get -inf.
        """
        own = self.draft_logits(states_MD, draft_lm_head).float()
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
        """Unroll draft chains from every slot at once, along the true tokens.

        Yields `steps` tensors (B, T, D). Entry t of tensor k is the state that drafts token
        t + 2 + k. Step 0 reads true features. Each later step reads the state before it in place
        of a feature. It sees what a draft in the engine sees: the true slots up to t, and the slots
        of its own chain (the training-time test of EAGLE-3, Li et al. 2025). Entries past the end
        of a sequence are arbitrary. Padding goes on the right; with `lengths`, the sequences are
        concatenated instead (`PackedDecoder.forward`).

        Raises:
            ValueError: `lengths` do not match the tokens, or are not supported here.
        """
        B, T = next_ids_BT.shape
        dtype, device = self.dtype, features_BTF.device
        by_kernels = supports_varlen(self.config, dtype, device)
        if lengths is not None and (B != 1 or sum(lengths) != T or min(lengths) < 1):
            raise ValueError(
                f"lengths={list(lengths)} do not add up to tokens of shape ({B}, {T}); pass one "
                "row with the tokens of all sequences"
            )
        chains: Attention
        if by_kernels:
            sizes = [T] * B if lengths is None else lengths
            chains = _KernelChains(self.config, self.eps, sizes, dtype)
        elif lengths is not None:
            raise ValueError(
                f"{dtype} on {device} does not support sequences without padding; pad them and "
                "leave lengths=None"
            )
        else:
            chains = _Chains(self.config, self.eps, T, features_BTF.dtype, device)
        ids, states_BTD = next_ids_BT, self.to_states(features_BTF)
        for step in range(steps):
            if step:
                ids = F.pad(ids[:, 1:], (0, 1))
            states_BTD = self.step(ids, states_BTD, embedding_VD, chains).view(B, T, -1)
            yield states_BTD

    def step(
        self, ids_BT: Tensor, states_BTD: Tensor, embedding_VD: Tensor, attention: Attention
    ) -> Tensor:
        """Return the next states (B * T, D) of tokens, each with the state before it."""
        x, qkv_input = self.layer_inputs(ids_BT, states_BTD, embedding_VD)
        x, delta = layer_between(
            self.layer, 0, x, x if qkv_input is None else qkv_input, attention, self.eps
        )
        return x + delta


def check_tokens(tokens: Sequence[int], vocab_size: int) -> None:
    """Raise ConfigError unless `tokens` are ascending ids below `vocab_size`, and at least one."""
    if not tokens or len(tokens) > vocab_size:
        raise ConfigError(
            f"the draft vocabulary has {len(tokens)} tokens; set "
            "speculative.eagle.draft_vocab_size to a number from 1 to the policy's "
            f"{vocab_size}"
        )
    if tokens[0] < 0 or tokens[-1] >= vocab_size or any(a >= b for a, b in pairwise(tokens)):
        raise ConfigError(
            f"the draft vocabulary must name tokens of the policy's {vocab_size}, each once and in "
            "ascending order; train another head with `slipstream draft`"
        )


def check_end_tokens(tokens: Sequence[int], ends: Sequence[int]) -> None:
    """Raise ConfigError if a draft vocabulary has none of the policy's end tokens."""
    if ends and not set(ends) & set(tokens):
        raise ConfigError(
            f"the draft vocabulary has none of the policy's end tokens {list(ends)}, so no draft "
            "could end a response; train another head with `slipstream draft`"
        )


def fuse_layer(layer: PackedLayer, config: ModelConfig, eps: Tensor) -> CpuLayers | None:
    """Return `PackedDraft.fused` for a layer; None if the kernels do not support it."""
    dtype, device = layer.qkv.weight.dtype, eps.device
    if has_kernels(activation_dtype(dtype, device), device) and supports_layers(config, dtype):
        return CpuLayers([layer], config, eps, None)
    return None


class _KernelChains:
    """`_Chains` by compiled kernels, over concatenated sequences of any lengths."""

    def __init__(
        self, config: ModelConfig, eps: Tensor, lengths: Sequence[int], dtype: torch.dtype
    ) -> None:
        self._c, self._eps = config, eps
        places = torch.cat([torch.arange(length) for length in lengths])
        # Clamped for padding, because the kernels read the rotation tables by address.
        self._positions = places.clamp(max=config.max_position_embeddings - 1)
        self._attention = CpuAttention(config, eps, self._positions[None], dtype, lengths=lengths)
        self._kv = self._attention.own_buffer()
        self._true: Tensor | None = None
        # Keys and values of each later step so far: (M, H, K).
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def __call__(self, index: int, qkv: Tensor, norms: Tensor | None, bounded: bool) -> Tensor:
        if self._true is None:
            self._true = qkv
            return self._attention.attend_and_store(qkv, norms, self._kv)
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
        return self._attention.attend_with_chains(qkv, norms, self._true, self._kv, chain)


class _Chains:
    """The attention of `unroll` by torch's operations, called once for each step.

    A slot sees the true slots up to itself, and the slots of its own chain in later steps. Each of
    these later slots adds one score, not a row of scores.
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
        # Keys and values of each step so far: (B, H, T, K).
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
