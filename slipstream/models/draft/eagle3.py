"""The EAGLE-3 draft head predicts tokens from the policy's hidden states at three depths.

    slot t:  g = fc([inputs of three of the policy's layers at token t])
             layer over [norm(embedding of token t+1) ; norm(g)], added to g -> state
             lm_head(norm(state)): token t+2

The state does not approximate a feature of the policy. It replaces g for the next draft token, and
training unrolls several steps so that the head learns to use its own states (Li et al. 2025,
EAGLE-3). The head has its own norm and LM head. Its LM head may cover only the most frequent
tokens. The embedding is the policy's.

The layer is of the Llama family for all policies, as in the classes of vLLM and SGLang for such
heads. Parameters have the names of published heads (`midlayer.hidden_norm.weight`, ...). Shapes as
in `models.draft.model`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.errors import ConfigError
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Decoder, Layer, Norm, init_parameters
from slipstream.models.draft.model import DraftModel, PackedDraft, fuse_layer
from slipstream.models.functional import add_norm
from slipstream.models.linear import PackedLinear
from slipstream.models.numerics import activation_dtype

NUM_AUX_LAYERS = 3
"""The number of auxiliary layers, as in the classes of vLLM and SGLang."""

_FEWEST_LAYERS = 7
"""With fewer layers, the default auxiliary layers are not three layers in ascending order."""


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """Return the layers whose inputs vLLM and SGLang read if a head names none.

    Raises ConfigError if the policy has too few layers.
    """
    if num_layers < _FEWEST_LAYERS:
        raise ConfigError(
            f"the default auxiliary layers of an EAGLE-3 head, 2, {num_layers // 2} and "
            f"{num_layers - 3} of {num_layers}, are not three layers in order; name three with "
            "speculative.eagle.aux_hidden_state_layer_ids, or set "
            "speculative.eagle.spec_algorithm=EAGLE"
        )
    return 2, num_layers // 2, num_layers - 3


class MidLayer(Layer):
    """The head's layer, with a norm for each half of its input."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, inputs=2 * config.hidden_size)
        self.hidden_norm = Norm(config.hidden_size)


class Eagle3Head(DraftModel):
    """The parameters of an EAGLE-3 head: `fc` (D, 3D), the layer, `norm` and `lm_head` (Z, D)."""

    algorithm = "EAGLE3"

    def __init__(
        self, config: ModelConfig, aux_layers: Sequence[int], tokens: Sequence[int] | None = None
    ) -> None:
        """`config` is the policy's configuration, possibly with other sizes of the layer.

        `tokens` is the draft vocabulary in ascending order; None: all tokens. Raises ConfigError
        unless `aux_layers` are three layers in ascending order and `tokens` are ascending token ids
        of the policy.
        """
        # The head has no sliding window. The decoder's own windows never hide a token either.
        config = replace(
            config,
            family="llama",
            tie_word_embeddings=False,
            sliding_window=None,
            windowed_layers=(),
        )
        super().__init__(config, tokens)
        self.aux_layers = tuple(aux_layers)
        check_aux_layers(self.aux_layers, config.num_layers)
        D = config.hidden_size
        self.fc = nn.Linear(NUM_AUX_LAYERS * D, D, bias=False)
        self.midlayer = MidLayer(config)
        self.norm = Norm(D)
        self.lm_head = nn.Linear(D, self.draft_vocab_size, bias=False)

    @torch.no_grad()
    def init_weights(self, seed: int, policy: Decoder | None = None) -> None:
        """Initialize the head so that it returns the last of its inputs, plus a little noise.

        If `policy` is given, the head starts with its norm and LM head. Then it drafts as if the
        token after next were the next token.
        """
        init_parameters(self, self.config.initializer_range, 1, seed)
        D = self.config.hidden_size
        self.fc.weight[:, -D:] += torch.eye(D)
        if policy is not None:
            rows = policy.lm_head_weight
            self.lm_head.weight.copy_(
                rows if self.draft_tokens is None else rows[self.draft_tokens]
            )
            self.norm.weight.copy_(policy.model.norm.weight)

    def pack(self, dtype: torch.dtype) -> PackedEagle3Head:
        """Return the weights in compute form. Differentiable."""
        device = self.device
        rows = activation_dtype(dtype, device)
        packed = self.midlayer.pack(self.config, dtype)
        eps = torch.full((), self.config.rms_norm_eps, device=device)
        return PackedEagle3Head(
            config=self.config,
            fc=PackedLinear.of(self.fc.weight.to(dtype)),
            layer=packed,
            eps=eps,
            fused=fuse_layer(packed, self.config, eps),
            hidden_norm=self.midlayer.hidden_norm.weight.to(rows),
            norm=self.norm.weight.to(rows),
            lm_head=PackedLinear.of(self.lm_head.weight.to(dtype)),
            tokens=self.draft_tokens,
        )

    def blank(self) -> Self:
        """Return an uninitialized head of the same shape, auxiliary layers and draft vocabulary."""
        return type(self)(self.config, self.aux_layers, self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedEagle3Head(PackedDraft):
    """An EAGLE-3 head in compute form."""

    hidden_norm: Tensor
    norm: Tensor
    lm_head: PackedLinear

    @property
    def state_norms(self) -> tuple[Tensor | None, Tensor | None]:
        """The norm of a state before the layer, and the norm before the LM head."""
        return self.hidden_norm, self.norm

    def to_states(self, features: Tensor) -> Tensor:
        """Return fc(features): one state for the hidden states of three layers."""
        return self.fc(features)

    def layer_inputs(
        self, ids_BT: Tensor, states_BTD: Tensor, embedding_VD: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the states and, as input of q, k and v, [norm(embedding) ; norm(state)]."""
        embedded = F.embedding(ids_BT.flatten(), embedding_VD)
        # Contiguous, because the kernels read rows by address.
        states = states_BTD.reshape(len(embedded), -1).contiguous()
        assert self.layer.input_norm is not None
        halves = (
            add_norm(embedded, None, self.layer.input_norm, self.eps)[1],
            add_norm(states, None, self.hidden_norm, self.eps)[1],
        )
        return states, torch.cat(halves, -1)

    def draft_lm_head(self, lm_head: PackedLinear) -> PackedLinear:
        """Return the head's own LM head."""
        return self.lm_head

    def draft_logits(self, states_MD: Tensor, draft_lm_head: PackedLinear) -> Tensor:
        """Return logits (M, Z) by the head's own norm and its LM head."""
        # Contiguous, because the kernels read rows by address.
        states_MD = states_MD.contiguous()
        return draft_lm_head(add_norm(states_MD, None, self.norm, self.eps)[1])


def check_aux_layers(aux_layers: Sequence[int], num_layers: int) -> None:
    """Raises ConfigError for auxiliary layers that are not three of `num_layers` in order."""
    in_order = all(a < b for a, b in pairwise(aux_layers))
    inside = all(0 <= layer < num_layers for layer in aux_layers)
    if len(aux_layers) != NUM_AUX_LAYERS or not in_order or not inside:
        raise ConfigError(
            f"an EAGLE-3 head reads the inputs of {NUM_AUX_LAYERS} of {num_layers} layers, "
            f"numbered from 0 and in ascending order, not of {list(aux_layers)}; set "
            "speculative.eagle.aux_hidden_state_layer_ids to such a list, or leave it at null"
        )
