"""Sequences that a draft head learns from, and how they become batches.

Knows tokens and features, not where they come from. Shapes: T tokens, D hidden width, F that
of what a sequence keeps of each token, V vocabulary.
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
from slipstream.models.decoder import Decoder, PackedDecoder, takes_sequences_in_a_row
from slipstream.models.linear import PackedLinear
from slipstream.models.numerics import activation_dtype, round_up
from slipstream.models.sharded import full
from slipstream.training.columns import train_batch
from slipstream.training.packing import LENGTH_MULTIPLE, build_micro_batch, plan_micro_batches
from slipstream.types import TrainRow


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSequence:
    """Tokens, what the policy's hidden states were over them, and which ones it wrote.

    `features_TF` are the inputs of the auxiliary layers, if the head reads any, and then the final
    hidden states, side by side. The last token's row may be missing: an engine that stops there
    does not compute it. Raises DataError if lengths disagree.
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
        """Tokens that can be drafted: the policy wrote them, and a slot comes two before."""
        return sum(map(bool, self.loss_mask[2:]))


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyEnds:
    """The policy's embedding and LM head, which a draft head works between."""

    embedding_VD: Tensor
    lm_head: PackedLinear
    dtype: torch.dtype
    """What is computed in."""

    @classmethod
    @torch.no_grad()
    def of(cls, policy: Decoder, dtype: torch.dtype) -> PolicyEnds:
        """A copy, which stays what it is while the policy goes on learning; collective where it is
        spread over processes."""
        head = full(policy.lm_head_weight.detach()).to(dtype, copy=True)
        rows = activation_dtype(dtype, policy.device)
        embedding = full(policy.model.embed_tokens.weight.detach()).to(rows, copy=True)
        return cls(embedding_VD=embedding, lm_head=PackedLinear.of(head), dtype=dtype)


def collate(
    sequences: Sequence[DraftSequence], ends: PolicyEnds, *, padded: bool = True
) -> DraftSamples:
    """One batch, padded on the right or one sequence after another, on the device and in the dtype
    of `ends`."""
    lengths = [len(s.tokens) for s in sequences]
    like, width = ends.embedding_VD, sequences[0].features_TF.shape[1]
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
            lm_head=ends.lm_head,
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
        lm_head=ends.lm_head,
    )


def length_buckets(lengths: Sequence[int], batch_size: int, key: str) -> list[list[int]]:
    """One pass over sequences in batches of similar length, in an order that `key` shuffles.

    A last batch may be smaller. Which sequences of equal length meet is shuffled, too.
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
    """Batches without end, pass after pass, each in an order of its own."""
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
    """The policy's hidden states over each text as in `DraftSequence`, (T, F), by its forward pass.

    At most `max_tokens` tokens, with padding where there is any, go through at once. Raises
    DataError for a text of more, or of more than the policy takes.
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
    padded = not takes_sequences_in_a_row(policy.config, policy.compute_dtype, device)
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
