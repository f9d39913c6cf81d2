"""A decoder with a scalar head on its final hidden states: what a critic is. Knows no files and no
losses; `critic_io` reads and writes it, `training.critic` trains it."""

from __future__ import annotations

from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Decoder
from slipstream.models.heads import ValueHead
from slipstream.models.lora import named_weights, value_of


class ValueModel(Decoder):
    """Parameters under the names of Hugging Face's token classification: `model.*`, `score.weight`
    (1, D) and `score.bias` (1,). There is no LM head, so embeddings count as tied."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(replace(config, tie_word_embeddings=True))
        self.score = ValueHead(config.hidden_size)

    @property
    def lm_head_weight(self) -> Tensor:
        """(1, D); in `pack` it stands where the vocabulary's would only take memory."""
        return self.score.weight

    @classmethod
    @torch.no_grad()
    def of(cls, policy: Decoder) -> Self:
        """A copy of the policy's weights, merged where it has an adapter, whose values are 0."""
        model = cls(policy.config).to(policy.device)
        weights = dict(named_weights(policy))
        for name, parameter in model.named_parameters():
            if not name.startswith("score."):
                parameter.copy_(value_of(weights[name]))
        return model
