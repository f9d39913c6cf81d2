"""The draft head's loss against a loop in plain numbers, and what it does not depend on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from slipstream.drafter.losses import DraftSamples, eagle_loss
from slipstream.errors import DataError
from slipstream.models.draft_head import DraftHead
from slipstream.models.linear import PackedLinear
from tests.models.helpers import config

B, T, D, V = 3, 9, 32, 96


def random_batch(seed: int = 0) -> DraftSamples:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(B, T)
    mask[0, :4] = 0
    mask[1, 7:] = 0
    return DraftSamples(
        tokens_BT=torch.randint(0, V, (B, T), generator=generator),
        features_BTD=torch.randn(B, T, D, generator=generator),
        loss_mask_BT=mask,
        embedding_VD=torch.randn(V, D, generator=generator),
        lm_head=PackedLinear.of(torch.randn(V, D, generator=generator) * 0.3),
    )


def passing_on() -> DraftHead:
    """A head whose prediction is the feature that it is given."""
    head = DraftHead(config("qwen3", hidden_size=D, vocab_size=V))
    head.init_weights(0)
    with torch.no_grad():
        head.fc.weight.zero_()[:, D:] = torch.eye(D)
        for name, parameter in head.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
    return head


def test_the_loss_is_that_of_a_loop() -> None:
    batch = random_batch()
    loss = eagle_loss(passing_on().pack(torch.float32), batch, value_weight=0.7, soft_weight=0.2)
    value, soft, hits = [], [], []
    for b in range(B):
        for t in range(T - 2):
            if not batch.loss_mask_BT[b, t + 2]:
                continue
            given, wanted = batch.features_BTD[b, t].double(), batch.features_BTD[b, t + 1].double()
            value.append(F.smooth_l1_loss(given, wanted))
            weight = batch.lm_head.weight.double()
            p, q = torch.softmax(weight @ wanted, -1), torch.softmax(weight @ given, -1)
            soft.append(-(p * q.log()).sum())
            hits.append(float(p.argmax() == q.argmax()))
    assert loss.slots == len(value) == 5 + 5 + 7
    assert float(loss.value) == pytest.approx(float(sum(value)) / len(value), rel=1e-5)
    assert float(loss.soft) == pytest.approx(float(sum(soft)) / len(soft), rel=1e-5)
    assert float(loss.accuracy) == pytest.approx(sum(hits) / len(hits))
    expected = 0.7 * float(loss.value) + 0.2 * float(loss.soft)
    assert float(loss.total.detach()) == pytest.approx(expected, rel=1e-6)


def test_padding_on_the_right_does_not_matter() -> None:
    head = DraftHead(config("qwen2", hidden_size=D, vocab_size=V))
    head.init_weights(3)
    batch = random_batch()
    padded = DraftSamples(
        tokens_BT=F.pad(batch.tokens_BT, (0, 5), value=7),
        features_BTD=F.pad(batch.features_BTD, (0, 0, 0, 5), value=9.0),
        loss_mask_BT=F.pad(batch.loss_mask_BT, (0, 5)),
        embedding_VD=batch.embedding_VD,
        lm_head=batch.lm_head,
    )
    one, other = (eagle_loss(head.pack(torch.float32), b) for b in (batch, padded))
    assert one.slots == other.slots
    torch.testing.assert_close(one.total, other.total)


def test_no_gradient_reaches_the_policy() -> None:
    batch = random_batch()
    features = batch.features_BTD.clone().requires_grad_()
    embedding = batch.embedding_VD.clone().requires_grad_()
    head = passing_on()
    batch = replace(batch, features_BTD=features, embedding_VD=embedding)
    eagle_loss(head.pack(torch.float32), batch).total.backward()  # type: ignore[no-untyped-call]
    assert features.grad is None
    assert embedding.grad is None
    assert all(p.grad is not None for p in head.parameters())


def test_a_batch_without_a_slot_is_refused() -> None:
    batch = replace(random_batch(), loss_mask_BT=torch.zeros(B, T))
    with pytest.raises(DataError, match="no token of the batch can be drafted"):
        eagle_loss(passing_on().pack(torch.float32), batch)


def test_deeper_losses_are_those_of_the_unrolled_predictions() -> None:
    head = DraftHead(config("qwen3", hidden_size=D, vocab_size=V))
    head.init_weights(3)
    batch, packed = random_batch(), head.pack(torch.float32)
    loss = eagle_loss(packed, batch, value_weight=0.7, soft_weight=0.2, depth=3, depth_decay=0.5)
    with torch.no_grad():
        ids, given = batch.tokens_BT[:, 1:], batch.features_BTD[:, :-1]
        unrolled = list(packed.unroll(ids, given, batch.embedding_VD, 3))
    total, weight = 0.0, 1.0
    for k, predicted in enumerate(unrolled):
        value, soft = [], []
        for b in range(B):
            for t in range(T - 2 - k):
                if batch.loss_mask_BT[b, t + 2 + k]:
                    mine, true = predicted[b, t].double(), batch.features_BTD[b, t + 1 + k].double()
                    value.append(float(F.smooth_l1_loss(mine, true)))
                    lm = batch.lm_head.weight.double()
                    p, log_q = torch.softmax(lm @ true, -1), torch.log_softmax(lm @ mine, -1)
                    soft.append(-float((p * log_q).sum()))
        total += weight * (0.7 * sum(value) / len(value) + 0.2 * sum(soft) / len(soft))
        weight /= 2
    assert len(loss.depth_accuracy) == 3
    assert float(loss.total.detach()) == pytest.approx(total / 1.75, rel=1e-5)
