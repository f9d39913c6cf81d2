"""EAGLE-3 draft head: from the policy's hidden states at three depths to tokens.

    slot t:  g = fc([inputs of three of the policy's layers at token t])
             layer over [norm(embedding of token t+1) ; norm(g)], added to g -> state
             lm_head(norm(state)): token t+2

What comes out of the layer is not meant to be any feature of the policy. It takes the place of g
for the next token, and how well is learned by drafting several in a row (Li et al. 2025, EAGLE-3).
The head has a norm and an LM head of its own, which may know the most frequent tokens only;
embeddings are the policy's.

The layer is one of Llama's family, whatever the policy's, as the engines' classes for such heads
have it; names are those of published heads (`midlayer.hidden_norm.weight`, ...). Shapes as in
`draft_model`.
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
from slipstream.models.draft.model import DraftModel, PackedDraft, one_call
from slipstream.models.functional import add_norm
from slipstream.models.linear import PackedLinear
from slipstream.models.numerics import activation_dtype

NUM_AUX_LAYERS = 3
"""As the engines' classes have it."""

_FEWEST_LAYERS = 7
"""The least number of layers for which the default auxiliary layers are three layers in order."""


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """The layers whose inputs vLLM and SGLang read if a head names none.

    Raises ConfigError for a policy of too few layers for that.
    """
    if num_layers < _FEWEST_LAYERS:
        raise ConfigError(
            f"the usual auxiliary layers of an EAGLE-3 head, 2, {num_layers // 2} and "
            f"{num_layers - 3} of {num_layers}, are not three layers in order; name three with "
            "speculative.eagle.aux_hidden_state_layer_ids, or set "
            "speculative.eagle.spec_algorithm=EAGLE"
        )
    return 2, num_layers // 2, num_layers - 3


class MidLayer(Layer):
    """The layer, with a norm for each half of what it is given."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, inputs=2 * config.hidden_size)
        self.hidden_norm = Norm(config.hidden_size)


class Eagle3Head(DraftModel):
    """The parameters: `fc` (D, 3D), the layer, `norm` and `lm_head` (Z, D)."""

    algorithm = "EAGLE3"

    def __init__(
        self, config: ModelConfig, aux_layers: Sequence[int], tokens: Sequence[int] | None = None
    ) -> None:
        """`config` of the policy, or with other sizes of the layer; `tokens`, in order, are those
        that it can draft, None: all.

        Raises ConfigError for auxiliary layers that are not three layers in order, and for
        tokens that are not some of the policy's in order.
        """
        # Nor has it a window, which a policy's may leave nothing out with either.
        config = replace(
            config,
            family="llama",
            tie_word_embeddings=False,
            sliding_window=None,
            windowed_layers=(),
        )
        super().__init__(config)
        self.aux_layers = tuple(aux_layers)
        self.tokens = None if tokens is None else tuple(tokens)
        _check_aux_layers(self.aux_layers, config.num_layers)
        if self.tokens is not None:
            check_tokens(self.tokens, config.vocab_size)
        D = config.hidden_size
        self.fc = nn.Linear(NUM_AUX_LAYERS * D, D, bias=False)
        self.midlayer = MidLayer(config)
        self.norm = Norm(D)
        self.lm_head = nn.Linear(D, self.draft_vocab_size, bias=False)

    @property
    def draft_vocab_size(self) -> int:
        """Z."""
        return self.config.vocab_size if self.tokens is None else len(self.tokens)

    @torch.no_grad()
    def init_weights(self, seed: int, policy: Decoder | None = None) -> None:
        """At first the head returns the last of its inputs, plus a little noise; with the policy's
        norm and LM head, where it is at hand, that drafts the token after next as if it were the
        next."""
        init_parameters(self, self.config.initializer_range, 1, seed)
        D = self.config.hidden_size
        self.fc.weight[:, -D:] += torch.eye(D)
        if policy is not None:
            rows = policy.lm_head_weight
            self.lm_head.weight.copy_(rows if self.tokens is None else rows[list(self.tokens)])
            self.norm.weight.copy_(policy.model.norm.weight)

    def pack(self, dtype: torch.dtype) -> PackedEagle3Head:
        """See `DraftModel`."""
        device = self.device
        rows = activation_dtype(dtype, device)
        packed = self.midlayer.pack(self.config, dtype)
        eps = torch.full((), self.config.rms_norm_eps, device=device)
        tokens = None if self.tokens is None else torch.tensor(self.tokens, device=device)
        return PackedEagle3Head(
            config=self.config,
            fc=PackedLinear.of(self.fc.weight.to(dtype)),
            layer=packed,
            eps=eps,
            together=one_call(packed, self.config, eps),
            hidden_norm=self.midlayer.hidden_norm.weight.to(rows),
            norm=self.norm.weight.to(rows),
            lm_head=PackedLinear.of(self.lm_head.weight.to(dtype)),
            draft_tokens=tokens,
        )

    def blank(self) -> Self:
        """See `DraftModel`."""
        return type(self)(self.config, self.aux_layers, self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedEagle3Head(PackedDraft):
    """Weights in compute form."""

    hidden_norm: Tensor
    norm: Tensor
    lm_head: PackedLinear
    draft_tokens: Tensor | None

    @property
    def tokens(self) -> Tensor | None:
        """See `PackedDraft`."""
        return self.draft_tokens

    @property
    def state_norms(self) -> tuple[Tensor | None, Tensor | None]:
        """See `PackedDraft`."""
        return self.hidden_norm, self.norm

    @property
    def own_lm_head(self) -> PackedLinear | None:
        """See `PackedDraft`."""
        return self.lm_head

    def taken(self, features: Tensor) -> Tensor:
        """See `PackedDraft`."""
        return self.fc(features)

    def enter(
        self, ids_BT: Tensor, states_BTD: Tensor, embedding_VD: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """See `PackedDraft`."""
        embedded = F.embedding(ids_BT.flatten(), embedding_VD)
        # Kernels read rows by address.
        states = states_BTD.reshape(len(embedded), -1).contiguous()
        assert self.layer.input_norm is not None
        halves = (
            add_norm(embedded, None, self.layer.input_norm, self.eps)[1],
            add_norm(states, None, self.hidden_norm, self.eps)[1],
        )
        return states, torch.cat(halves, -1)

    def draft_logits(self, states_MD: Tensor, lm_head: PackedLinear) -> Tensor:
        """See `PackedDraft`; the policy's LM head is not needed."""
        # Kernels read rows by address.
        states_MD = states_MD.contiguous()
        return self.lm_head(add_norm(states_MD, None, self.norm, self.eps)[1])


def _check_aux_layers(aux_layers: tuple[int, ...], num_layers: int) -> None:
    in_order = all(a < b for a, b in pairwise(aux_layers))
    inside = all(0 <= layer < num_layers for layer in aux_layers)
    if len(aux_layers) != NUM_AUX_LAYERS or not in_order or not inside:
        raise ConfigError(
            f"an EAGLE-3 head takes the inputs of {NUM_AUX_LAYERS} of {num_layers} layers, "
            f"from the first on and numbered from 0, not of {list(aux_layers)}; set "
            "speculative.eagle.aux_hidden_state_layer_ids so, or leave it at null"
        )


def check_tokens(tokens: Sequence[int], vocab_size: int) -> None:
    """Raises ConfigError for a draft vocabulary that is not some of `vocab_size` tokens in order,
    each once."""
    if not tokens or len(tokens) > vocab_size:
        raise ConfigError(
            f"a draft vocabulary of {len(tokens)} tokens: it must have at least 1 and at most the "
            f"policy's {vocab_size}; set speculative.eagle.draft_vocab_size so"
        )
    if tokens[0] < 0 or tokens[-1] >= vocab_size or any(a >= b for a, b in pairwise(tokens)):
        raise ConfigError(
            f"the draft vocabulary must name some of the policy's {vocab_size} tokens, each once "
            "and from the lowest on; train another head with `slipstream draft`"
        )
