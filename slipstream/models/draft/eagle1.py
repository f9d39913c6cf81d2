"""EAGLE-1/2 draft head: from the policy's feature at one position to its feature at the next.

    slot t:  fc([embedding of token t+1 ; feature of token t]) -> one decoder layer -> feature t+1

Features are the policy's final hidden states, after its last norm, so the policy's own LM head
turns a predicted feature into a distribution of token t+2. Fed back in place of the true feature,
the prediction goes one token further (Li et al. 2024, EAGLE and EAGLE-2). Embedding and LM head are
the policy's, passed in at each use: a copy would grow stale while the policy learns.

The layer has the policy's shape and family, without an input norm. Names are those of published
EAGLE heads (`fc.weight`, `layers.0.self_attn.q_proj.weight`, ...). Shapes as in `draft_model`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Decoder, Layer, init_parameters
from slipstream.models.draft.model import DraftModel, PackedDraft, one_call
from slipstream.models.linear import PackedLinear


class DraftHead(DraftModel):
    """The parameters: `fc` (D, 2D) and one layer."""

    algorithm = "EAGLE"
    aux_layers = ()

    def __init__(self, config: ModelConfig) -> None:
        """`config` of the policy that the head drafts for."""
        super().__init__(config)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([Layer(config, input_norm=False)])

    @torch.no_grad()
    def init_weights(self, seed: int, policy: Decoder | None = None) -> None:
        """At first the head hands on the feature it is given, plus a little noise.

        A head that begins as the identity drafts the token after next as if it were the next; from
        there training is short.
        """
        init_parameters(self, self.config.initializer_range, 1, seed)
        D = self.config.hidden_size
        self.fc.weight[:, D:] += torch.eye(D)

    def pack(self, dtype: torch.dtype) -> PackedDraftHead:
        """See `DraftModel`."""
        (layer,) = self.layers
        assert isinstance(layer, Layer)
        packed = layer.pack(self.config, dtype)
        eps = torch.full((), self.config.rms_norm_eps, device=self.device)
        return PackedDraftHead(
            config=self.config,
            fc=PackedLinear.of(self.fc.weight.to(dtype)),
            layer=packed,
            eps=eps,
            together=one_call(packed, self.config, eps),
        )

    def blank(self) -> Self:
        """See `DraftModel`."""
        return type(self)(self.config)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedDraftHead(PackedDraft):
    """Weights in compute form: a state is a feature."""

    @property
    def predicts_features(self) -> bool:
        """See `PackedDraft`."""
        return True

    def taken(self, features: Tensor) -> Tensor:
        """See `PackedDraft`."""
        return features

    def enter(
        self, ids_BT: Tensor, states_BTD: Tensor, embedding_VD: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """See `PackedDraft`."""
        embedded = F.embedding(ids_BT.flatten(), embedding_VD)
        return self.fc(torch.cat([embedded, states_BTD.reshape(len(embedded), -1)], -1)), None

    def draft_logits(self, states_MD: Tensor, lm_head: PackedLinear) -> Tensor:
        """See `PackedDraft`."""
        return lm_head(states_MD)
