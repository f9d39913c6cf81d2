"""Training sequences: padding, batches, features, and the copy of embedding and LM head."""

from __future__ import annotations

import itertools

import pytest
import torch

from slipstream.drafter.sequences import (
    DraftSequence,
    VocabLayers,
    collate,
    length_buckets,
    passes,
    policy_features,
)
from slipstream.errors import DataError
from tests.drafter.helpers import requests, responses, vocab_of
from tests.inference.helpers import make_decoder, shared_decoder


def sequence(length: int, *, rows: int | None = None, start: int = 1) -> DraftSequence:
    return DraftSequence(
        tokens=list(range(3, 3 + length)),
        features_TF=torch.full((length if rows is None else rows, 32), 2.0),
        loss_mask=[0.0] * start + [1.0] * (length - start),
    )


def test_rejects_lengths_that_disagree() -> None:
    with pytest.raises(DataError, match="5 tokens has 3 features"):
        sequence(5, rows=3)
    with pytest.raises(DataError, match="a loss mask of 1"):
        DraftSequence(tokens=[1, 2], features_TF=torch.zeros(2, 4), loss_mask=[1.0])


def test_slots_start_at_the_third_token() -> None:
    assert [sequence(n).slots for n in (2, 3, 7)] == [0, 1, 5]
    assert sequence(7, start=4).slots == 3


def test_batch_is_padded_on_the_right() -> None:
    batch = collate([sequence(5, rows=4), sequence(18)], vocab_of(shared_decoder()))
    assert batch.tokens_BT.shape == (2, 32)
    assert batch.tokens_BT[0].tolist() == [3, 4, 5, 6, 7] + [0] * 27
    assert batch.loss_mask_BT[0].tolist() == [0.0] + [1.0] * 4 + [0.0] * 27
    assert batch.features_BTF[0, :, 0].tolist() == [2.0] * 4 + [0.0] * 28
    assert batch.slots(4).tolist() == [0, *range(32, 46)]


def test_batch_without_padding_concatenates_sequences() -> None:
    made = [sequence(5, rows=4), sequence(3, rows=2)]
    batch = collate(made, vocab_of(shared_decoder()), padded=False)
    assert batch.lengths == [5, 3]
    assert batch.tokens_BT.tolist() == [[3, 4, 5, 6, 7, 3, 4, 5]]
    assert batch.loss_mask_BT.tolist() == [[0.0] + [1.0] * 4 + [0.0] + [1.0] * 2]
    assert batch.features_BTF[0, :, 0].tolist() == [2.0] * 4 + [0.0] + [2.0] * 2 + [0.0]
    sequence_M, position_M, left_M = batch.positions()
    assert sequence_M.tolist() == [0] * 5 + [1] * 3
    assert position_M.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert left_M.tolist() == [4, 3, 2, 1, 0, 2, 1, 0]
    # No slot drafts a token of the next sequence.
    assert batch.slots(2).tolist() == [0, 1, 2, 5]
    assert batch.slots(3).tolist() == [0, 1]


def test_buckets_have_each_sequence_once_and_similar_lengths() -> None:
    lengths = [(7 * i) % 50 + 3 for i in range(45)]
    batches = length_buckets(lengths, 8, "a")
    assert sorted(itertools.chain(*batches)) == list(range(45))
    assert sorted(map(len, batches)) == [5, 8, 8, 8, 8, 8]
    spread = [max(lengths[i] for i in b) - min(lengths[i] for i in b) for b in batches]
    assert max(spread) <= 12
    assert length_buckets(lengths, 8, "a") == batches
    assert length_buckets(lengths, 8, "b") != batches


def test_each_pass_has_another_order() -> None:
    made = [sequence(n) for n in (3, 4, 5, 6)]
    numbers = [len(s.tokens) for b in itertools.islice(passes(made, 1, "x"), 12) for s in b]
    assert [sorted(numbers[i : i + 4]) for i in (0, 4, 8)] == [[3, 4, 5, 6]] * 3
    assert len({tuple(numbers[i : i + 4]) for i in (0, 4, 8)}) > 1


def test_policy_features_equal_the_engine_features() -> None:
    decoder = shared_decoder()
    made = responses(decoder, requests(9, seed=2))
    with torch.no_grad():
        policy = decoder.pack(torch.float32)
    found = policy_features(policy, [h.sequence.tokens for h in made], max_tokens=96)
    for held_out, features in zip(made, found, strict=True):
        assert torch.equal(features[:-1], held_out.sequence.features_TF)


def test_rejects_texts_beyond_the_limits() -> None:
    with torch.no_grad():
        policy = shared_decoder().pack(torch.float32)
    with pytest.raises(DataError, match="budget of 16"):
        policy_features(policy, [[1] * 17], max_tokens=16)
    limit = policy.config.max_position_embeddings
    with pytest.raises(DataError, match=rf"{limit + 1} tokens is too long .*max_seq_len={limit}$"):
        policy_features(policy, [[1] * (limit + 1)])


def test_copy_does_not_change_with_the_policy() -> None:
    decoder = make_decoder()
    vocab = VocabLayers.of(decoder, torch.float32)
    embedding, head = vocab.embedding_VD.clone(), vocab.lm_head.weight.clone()
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(1.0)
    assert torch.equal(vocab.embedding_VD, embedding)
    assert torch.equal(vocab.lm_head.weight, head)
