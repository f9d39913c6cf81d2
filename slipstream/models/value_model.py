"""The critic: a decoder with a scalar head on its final hidden states.

This module knows no files and no losses. `critic_io` reads and writes the model; `training.critic`
trains it. Shapes: D hidden width.
"""

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
    """A value model whose parameters have the names of Hugging Face's token classification models.

    They are `model.*`, `score.weight` (1, D) and `score.bias` (1,). There is no LM head, so the
    configuration says that embeddings are tied.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(replace(config, tie_word_embeddings=True))
        self.score = ValueHead(config.hidden_size)

    @property
    def lm_head_weight(self) -> Tensor:
        """(1, D): the value head's weight. `pack` uses it as a small placeholder for an LM head."""
        return self.score.weight

    @classmethod
    @torch.no_grad()
    def of(cls, policy: Decoder) -> Self:
        """Return a value model with a copy of the policy's weights; all its values are 0.

        If the policy has a LoRA adapter, the copy is of the merged weights.
        """
        model = cls(policy.config).to(policy.device)
        weights = dict(named_weights(policy))
        for name, parameter in model.named_parameters():
            if not name.startswith("score."):
                parameter.copy_(value_of(weights[name]))
        return model
