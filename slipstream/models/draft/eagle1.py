"""The EAGLE-1/2 draft head predicts the policy's feature at the next position from this one.

    slot t:  fc([embedding of token t+1 ; feature of token t]) -> one decoder layer -> feature t+1

Features are the policy's final hidden states, after its last norm. So the policy's own LM head
turns a predicted feature into a distribution of token t+2. To draft the next token, the prediction
replaces the true feature (Li et al. 2024, EAGLE and EAGLE-2). Embedding and LM head are the
policy's and are passed in at each use, because a copy would become stale while the policy learns.
With a draft vocabulary, only the rows of its tokens are used (Zhao et al. 2025, FR-Spec).

The layer has the policy's shape and family, without an input norm. Parameters have the names of
published EAGLE heads (`fc.weight`, `layers.0.self_attn.q_proj.weight`, ...). Shapes as in
`models.draft.model`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Decoder, Layer, init_parameters
from slipstream.models.draft.model import DraftModel, PackedDraft, fuse_layer
from slipstream.models.linear import PackedLinear


class DraftHead(DraftModel):
    """The parameters of an EAGLE-1/2 head: `fc` (D, 2D) and one layer."""

    algorithm = "EAGLE"
    aux_layers = ()

    def __init__(self, config: ModelConfig, tokens: Sequence[int] | None = None) -> None:
        """`config` is the configuration of the policy that the head drafts for.

        `tokens` is the draft vocabulary; None: all tokens. Its tokens and their number can change
        (`set_tokens`), because the LM head is the policy's. Raises ConfigError unless these are
        token ids of the policy in ascending order.
        """
        super().__init__(config, tokens)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([Layer(config, input_norm=False)])

    @torch.no_grad()
    def init_weights(self, seed: int, policy: Decoder | None = None) -> None:
        """Initialize the head so that it returns its input feature, plus a little noise.

        Such a head drafts as if the token after next were the next token. Training from there is
        short.
        """
        init_parameters(self, self.config.initializer_range, 1, seed)
        D = self.config.hidden_size
        self.fc.weight[:, D:] += torch.eye(D)

    def pack(self, dtype: torch.dtype) -> PackedDraftHead:
        """Return the weights in compute form. Differentiable."""
        (layer,) = self.layers
        assert isinstance(layer, Layer)
        packed = layer.pack(self.config, dtype)
        eps = torch.full((), self.config.rms_norm_eps, device=self.device)
        return PackedDraftHead(
            config=self.config,
            fc=PackedLinear.of(self.fc.weight.to(dtype)),
            layer=packed,
            eps=eps,
            fused=fuse_layer(packed, self.config, eps),
            tokens=self.draft_tokens,
        )

    def blank(self) -> Self:
        """Return an uninitialized head of the same shape."""
        return type(self)(self.config, self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedDraftHead(PackedDraft):
    """An EAGLE-1/2 head in compute form. Its states are features."""

    @property
    def predicts_features(self) -> bool:
        """True: training compares states with the policy's final hidden states."""
        return True

    def to_states(self, features: Tensor) -> Tensor:
        """Return the features unchanged, because they are the states."""
        return features

    def layer_inputs(
        self, ids_BT: Tensor, states_BTD: Tensor, embedding_VD: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return fc([embedding ; state]) as the layer's only input."""
        embedded = F.embedding(ids_BT.flatten(), embedding_VD)
        return self.fc(torch.cat([embedded, states_BTD.reshape(len(embedded), -1)], -1)), None

    def draft_lm_head(self, lm_head: PackedLinear) -> PackedLinear:
        """Return the policy's LM head, or a copy of its rows for the draft vocabulary."""
        return lm_head if self.tokens is None else lm_head.rows(self.tokens)

    def draft_logits(self, states_MD: Tensor, draft_lm_head: PackedLinear) -> Tensor:
        """Return logits (M, Z) by the LM head."""
        return draft_lm_head(states_MD)
