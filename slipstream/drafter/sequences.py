"""Training sequences of a draft head, and batches of them.

This module knows tokens and features, not their source. Shapes: T tokens, D hidden width, F width
of a token's features, V vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from slipstream.drafter.losses import DraftSamples
from slipstream.errors import DataError
from slipstream.models.decoder import Decoder, PackedDecoder, supports_varlen
from slipstream.models.linear import PackedLinear
from slipstream.models.numerics import activation_dtype, round_up
from slipstream.models.sharded import full
from slipstream.training.columns import train_batch
from slipstream.training.packing import LENGTH_MULTIPLE, build_micro_batch, plan_micro_batches
from slipstream.types import TrainRow


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSequence:
    """Tokens, the policy's hidden states at each token, and a mask of the tokens that it wrote.

    `features_TF` are the inputs of the auxiliary layers, if the head reads any, concatenated with
    the final hidden states. The last token's row may be missing, because an engine does not compute
    it. Raises DataError if the lengths disagree.
    """

    tokens: Sequence[int]
    features_TF: Tensor
    loss_mask: Sequence[float]

    def __post_init__(self) -> None:
        T, rows = len(self.tokens), len(self.features_TF)
        if len(self.loss_mask) != T or rows not in (T, T - 1):
            raise DataError(
                f"a sequence of {T} tokens has {rows} features and a loss mask of "
                f"{len(self.loss_mask)}; it needs {T - 1} or {T} features and {T} mask entries"
            )

    @property
    def slots(self) -> int:
        """Number of tokens that can be drafted: written by the policy, from the third token on.
        Slot t drafts token t + 2."""
        return sum(map(bool, self.loss_mask[2:]))


def written(sequence: DraftSequence) -> list[int]:
    """Return the tokens that the policy wrote."""
    return [t for t, m in zip(sequence.tokens, sequence.loss_mask, strict=True) if m]


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabLayers:
    """Embedding and LM head of a policy. A draft head has none of its own and uses these."""

    embedding_VD: Tensor
    lm_head: PackedLinear
    dtype: torch.dtype
    """The dtype that the head computes in."""

    @classmethod
    @torch.no_grad()
    def of(cls, policy: Decoder, dtype: torch.dtype) -> VocabLayers:
        """Copy the embedding and LM head of `policy`, so that later updates do not change them.
        Collective if the policy is sharded over processes."""
        head = full(policy.lm_head_weight.detach()).to(dtype, copy=True)
        rows = activation_dtype(dtype, policy.device)
        embedding = full(policy.model.embed_tokens.weight.detach()).to(rows, copy=True)
        return cls(embedding_VD=embedding, lm_head=PackedLinear.of(head), dtype=dtype)


def collate(
    sequences: Sequence[DraftSequence], vocab: VocabLayers, *, padded: bool = True
) -> DraftSamples:
    """Make one batch on the device and in the dtype of `vocab`. It is padded on the right, or
    concatenated if `padded` is False."""
    lengths = [len(s.tokens) for s in sequences]
    like, width = vocab.embedding_VD, sequences[0].features_TF.shape[1]
    if not padded:
        together = like.new_zeros(1, sum(lengths), width)
        for start, sequence in zip(accumulate(lengths, initial=0), sequences, strict=False):
            rows = len(sequence.features_TF)
            together[0, start : start + rows] = sequence.features_TF
        return DraftSamples(
            tokens_BT=torch.tensor([[t for s in sequences for t in s.tokens]], device=like.device),
            features_BTF=together,
            loss_mask_BT=torch.tensor(
                [[m for s in sequences for m in s.loss_mask]], device=like.device
            ),
            embedding_VD=like,
            lm_head=vocab.lm_head,
            lengths=lengths,
        )
    longest = round_up(max(lengths), LENGTH_MULTIPLE)
    ids = torch.zeros(len(sequences), longest, dtype=torch.int64)
    mask = torch.zeros(len(sequences), longest)
    features = like.new_zeros(len(sequences), longest, width)
    for b, sequence in enumerate(sequences):
        T = len(sequence.tokens)
        ids[b, :T] = torch.tensor(sequence.tokens)
        mask[b, :T] = torch.tensor(sequence.loss_mask)
        features[b, : len(sequence.features_TF)] = sequence.features_TF
    return DraftSamples(
        tokens_BT=ids.to(like.device),
        features_BTF=features,
        loss_mask_BT=mask.to(like.device),
        embedding_VD=like,
        lm_head=vocab.lm_head,
    )


def length_buckets(lengths: Sequence[int], batch_size: int, key: str) -> list[list[int]]:
    """Split sequences into batches of similar length; returns indices.

    `key` seeds the order of the batches and of sequences of equal length. One batch may be smaller.
    """
    draw = random.Random(key)
    order = list(range(len(lengths)))
    draw.shuffle(order)
    order.sort(key=lambda index: lengths[index])
    batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    draw.shuffle(batches)
    return batches


def passes(
    sequences: Sequence[DraftSequence], batch_size: int, key: str
) -> Iterator[list[DraftSequence]]:
    """Yield batches of `sequences` forever, pass after pass, each pass in another order."""
    lengths = [len(s.tokens) for s in sequences]
    number = 0
    while True:
        for batch in length_buckets(lengths, batch_size, f"{key}/{number}"):
            yield [sequences[index] for index in batch]
        number += 1


@torch.no_grad()
def policy_features(
    policy: PackedDecoder,
    texts: Sequence[Sequence[int]],
    *,
    aux_layers: Sequence[int] = (),
    max_tokens: int = 8192,
) -> list[Tensor]:
    """The policy's features (T, F) of each text, as in `DraftSequence`, by its forward pass.

    A forward pass has at most `max_tokens` tokens, including padding. Raises DataError for a text
    that is longer than that, or longer than the policy's context.
    """
    limit = policy.config.context_limit
    longest = max(map(len, texts), default=0)
    if longest > limit.tokens:
        raise DataError(
            f"a text of {longest} tokens is too long for the policy: {limit.reason}; set "
            f"speculative.train.max_seq_len={limit.tokens}"
        )
    found: list[Tensor] = [torch.empty(0)] * len(texts)
    device = policy.embedding.device
    lengths = {index: len(text) for index, text in enumerate(texts)}
    padded = not supports_varlen(policy.config, policy.compute_dtype, device)
    batch = train_batch(
        [TrainRow(tokens=list(text), loss_mask=[1.0] * len(text)) for text in texts]
    )
    for indices in plan_micro_batches(lengths, max_tokens=max_tokens, padded=padded):
        micro = build_micro_batch(
            batch, indices, pad_id=0, max_positions=limit.tokens, device=device, padded=padded
        )
        states = policy.forward(
            micro.ids, micro.positions, lengths=micro.lengths, aux_layers=aux_layers
        )
        rows = states.side_by_side().flatten(0, 1)
        for start, index in zip(micro.starts, indices, strict=True):
            found[index] = rows[start : start + lengths[index]].clone()
    return found
