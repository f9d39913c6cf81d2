"""The draft head's losses against plain loops, finite differences and closed forms."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from slipstream.drafter.losses import (
    DraftSamples,
    acceptance_loss,
    draft_loss,
    topk_mass_loss,
)
from slipstream.errors import DataError
from slipstream.models.draft.eagle1 import DraftHead
from slipstream.models.draft.eagle3 import Eagle3Head
from slipstream.models.draft.model import DraftModel
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
        features_BTF=torch.randn(B, T, D, generator=generator),
        loss_mask_BT=mask,
        embedding_VD=torch.randn(V, D, generator=generator),
        lm_head=PackedLinear.of(torch.randn(V, D, generator=generator) * 0.3),
    )


def identity_head() -> DraftHead:
    """A head that predicts its input feature."""
    head = DraftHead(config("qwen3", hidden_size=D, vocab_size=V))
    head.init_weights(0)
    with torch.no_grad():
        head.fc.weight.zero_()[:, D:] = torch.eye(D)
        for name, parameter in head.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
    return head


def test_loss_equals_a_plain_loop() -> None:
    batch = random_batch()
    loss = draft_loss(identity_head().pack(torch.float32), batch, value_weight=0.7, soft_weight=0.2)
    value, soft, hits = [], [], []
    for b in range(B):
        for t in range(T - 2):
            if not batch.loss_mask_BT[b, t + 2]:
                continue
            given, wanted = batch.features_BTF[b, t].double(), batch.features_BTF[b, t + 1].double()
            value.append(F.smooth_l1_loss(given, wanted))
            weight = batch.lm_head.weight.double()
            p, q = torch.softmax(weight @ wanted, -1), torch.softmax(weight @ given, -1)
            soft.append(-(p * q.log()).sum())
            hits.append(float(p.argmax() == q.argmax()))
    assert loss.slots == len(value) == 5 + 5 + 7
    assert loss.value is not None
    assert float(loss.value) == pytest.approx(float(sum(value)) / len(value), rel=1e-5)
    assert float(loss.soft) == pytest.approx(float(sum(soft)) / len(soft), rel=1e-5)
    assert float(loss.accuracy) == pytest.approx(sum(hits) / len(hits))
    expected = 0.7 * float(loss.value) + 0.2 * float(loss.soft)
    assert float(loss.total.detach()) == pytest.approx(expected, rel=1e-6)


def test_padding_does_not_change_the_loss() -> None:
    head = DraftHead(config("qwen2", hidden_size=D, vocab_size=V))
    head.init_weights(3)
    batch = random_batch()
    padded = DraftSamples(
        tokens_BT=F.pad(batch.tokens_BT, (0, 5), value=7),
        features_BTF=F.pad(batch.features_BTF, (0, 0, 0, 5), value=9.0),
        loss_mask_BT=F.pad(batch.loss_mask_BT, (0, 5)),
        embedding_VD=batch.embedding_VD,
        lm_head=batch.lm_head,
    )
    one, other = (draft_loss(head.pack(torch.float32), b) for b in (batch, padded))
    assert one.slots == other.slots
    torch.testing.assert_close(one.total, other.total)


def test_no_gradient_reaches_the_policy() -> None:
    batch = random_batch()
    features = batch.features_BTF.clone().requires_grad_()
    embedding = batch.embedding_VD.clone().requires_grad_()
    head = identity_head()
    batch = replace(batch, features_BTF=features, embedding_VD=embedding)
    draft_loss(head.pack(torch.float32), batch).total.backward()  # type: ignore[no-untyped-call]
    assert features.grad is None
    assert embedding.grad is None
    assert all(p.grad is not None for p in head.parameters())


def test_rejects_a_batch_without_slots() -> None:
    batch = replace(random_batch(), loss_mask_BT=torch.zeros(B, T))
    with pytest.raises(DataError, match="no token of the batch can be drafted"):
        draft_loss(identity_head().pack(torch.float32), batch)


def test_deeper_losses_equal_a_loop_over_unrolled_predictions() -> None:
    head = DraftHead(config("qwen3", hidden_size=D, vocab_size=V))
    head.init_weights(3)
    batch, packed = random_batch(), head.pack(torch.float32)
    loss = draft_loss(packed, batch, value_weight=0.7, soft_weight=0.2, depth=3, depth_decay=0.5)
    with torch.no_grad():
        ids, given = batch.tokens_BT[:, 1:], batch.features_BTF[:, :-1]
        unrolled = list(packed.unroll(ids, given, batch.embedding_VD, 3))
    total, weight = 0.0, 1.0
    for k, predicted in enumerate(unrolled):
        value, soft = [], []
        for b in range(B):
            for t in range(T - 2 - k):
                if batch.loss_mask_BT[b, t + 2 + k]:
                    mine, true = predicted[b, t].double(), batch.features_BTF[b, t + 1 + k].double()
                    value.append(float(F.smooth_l1_loss(mine, true)))
                    lm = batch.lm_head.weight.double()
                    p, log_q = torch.softmax(lm @ true, -1), torch.log_softmax(lm @ mine, -1)
                    soft.append(-float((p * log_q).sum()))
        total += weight * (0.7 * sum(value) / len(value) + 0.2 * sum(soft) / len(soft))
        weight /= 2
    assert float(loss.total.detach()) == pytest.approx(total / 1.75, rel=1e-5)


def test_acceptance_loss_is_minus_log_of_the_overlap() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]], dtype=torch.float64)
    q = torch.tensor([[0.2, 0.2, 0.6], [0.1, 0.2, 0.7]], dtype=torch.float64)
    # The overlap is 0.2 + 0.2 + 0.2 in the first row and 1 in the second.
    expected = -(math.log(0.6) + math.log(1.0)) / 2
    assert float(acceptance_loss(p.log(), q.log())) == pytest.approx(expected)


def test_acceptance_loss_has_a_gradient_without_overlap() -> None:
    logits = torch.tensor([[200.0, 0.0]], requires_grad=True)
    log_p = torch.log_softmax(torch.tensor([[0.0, 200.0]]), -1)
    loss = acceptance_loss(log_p, torch.log_softmax(logits, -1))
    assert float(loss.detach()) == pytest.approx(200 - math.log(2), rel=1e-5)
    loss.backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert logits.grad[0].tolist() == pytest.approx([0.5, -0.5], rel=1e-4)


def test_acceptance_loss_gradient_equals_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    log_p, logits = (
        torch.randn(5, 11, dtype=torch.float64, generator=generator).mul_(2) for _ in range(2)
    )
    log_p = torch.log_softmax(log_p, -1)
    assert torch.autograd.gradcheck(
        lambda given: acceptance_loss(log_p, torch.log_softmax(given, -1)),
        logits.requires_grad_(),
    )


def membership(q: list[float], k: int) -> list[float]:
    """Probability of each token to be membership the `k` candidates, by plain bisection."""
    low, high = 1e-9, 1.0
    for _ in range(200):
        level = (low * high) ** 0.5
        enough = sum(1 - math.exp(-one / level) for one in q) > k
        low, high = (level, high) if enough else (low, level)
    return [1 - math.exp(-one / low) for one in q]


def test_top_k_mass_loss_equals_a_plain_loop() -> None:
    generator = torch.Generator().manual_seed(1)
    log_p, log_q = (
        torch.log_softmax(torch.randn(7, 13, dtype=torch.float64, generator=generator) * 2, -1)
        for _ in range(2)
    )
    for k in (1, 2, 4, 12):
        expected = []
        for p, q in zip(log_p.exp().tolist(), log_q.exp().tolist(), strict=True):
            members = membership(q, k)
            assert sum(members) == pytest.approx(k)
            expected.append(-math.log(sum(a * b for a, b in zip(p, members, strict=True))))
        found = float(topk_mass_loss(log_p, log_q, k))
        assert found == pytest.approx(sum(expected) / len(expected), rel=1e-9)
    # A uniform head chooses k of V tokens at random.
    flat = torch.full((7, 13), -math.log(13))
    assert float(topk_mass_loss(log_p.float(), flat, 4)) == pytest.approx(math.log(13 / 4))


def test_membership_probabilities_match_sampling() -> None:
    """Against frequencies among the best of log q + G over many draws. The formula is conditional
    on the threshold, so it is only close to the frequencies."""
    generator = torch.Generator().manual_seed(2)
    log_q = torch.log_softmax(torch.tensor([2.0, 1.0, 0.0, 0.0, -1.0, -2.0, -3.0, -9.0]), -1)
    noise = -torch.log(-torch.log(torch.rand(40_000, 8, generator=generator)))
    best = (log_q + noise).topk(3, -1).indices
    drawn = torch.bincount(best.flatten(), minlength=8) / 40_000
    for token in range(8):
        log_p = torch.log_softmax(100.0 * F.one_hot(torch.tensor([token]), 8).float(), -1)
        found = math.exp(-float(topk_mass_loss(log_p, log_q[None], 3)))
        assert found == pytest.approx(float(drawn[token]), abs=0.03)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_top_k_mass_of_a_confident_head_is_the_mass_on_its_best_tokens(
    dtype: torch.dtype,
) -> None:
    p = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=dtype)
    logits = torch.tensor([[0.0, 300.0, 100.0, 400.0]], dtype=dtype, requires_grad=True)
    for k, mass in ((1, 0.05), (2, 0.35), (3, 0.5)):
        loss = topk_mass_loss(p.log(), torch.log_softmax(logits, -1), k)
        assert float(loss.detach()) == pytest.approx(-math.log(mass), rel=1e-5)
        loss.backward()  # type: ignore[no-untyped-call]
        assert logits.grad is not None
        assert logits.grad.isfinite().all()


def test_top_k_mass_loss_gradient_equals_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    log_p, logits = (
        torch.randn(5, 11, dtype=torch.float64, generator=generator).mul_(2) for _ in range(2)
    )
    log_p = torch.log_softmax(log_p, -1)
    logits.requires_grad_()
    for k in (1, 3, 10):
        assert torch.autograd.gradcheck(
            lambda given, k=k: topk_mass_loss(log_p, torch.log_softmax(given, -1), k), logits
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_top_k_mass_loss_has_a_gradient_for_a_token_far_from_the_candidates(
    dtype: torch.dtype,
) -> None:
    log_p = torch.log_softmax(torch.tensor([[0.0, 0.0, 0.0, 200.0]], dtype=dtype), -1)
    logits = torch.tensor([[90.0, 60.0, 30.0, 0.0]], dtype=dtype, requires_grad=True)
    loss = topk_mass_loss(log_p, torch.log_softmax(logits, -1), 2)
    # The threshold is between 60 and 30; the exact value depends on the precision.
    assert 30 < float(loss.detach()) < 60
    loss.backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert float(logits.grad[0, 3]) == pytest.approx(-1.0, abs=1e-3)
    assert float(logits.grad.sum()) == pytest.approx(0.0, abs=1e-3)


def test_rejects_topk_not_below_the_vocabulary() -> None:
    batch, packed = random_batch(), identity_head().pack(torch.float32)
    draft_loss(packed, batch, topk_mass_weight=0.1, topk=V - 1)
    with pytest.raises(ValueError, match=f"topk={V} must be below the vocabulary's {V} tokens"):
        draft_loss(packed, batch, topk_mass_weight=0.1, topk=V)


def test_top_k_mass_loss_counts_at_every_depth_if_weighted() -> None:
    head = DraftHead(config("qwen3", hidden_size=D, vocab_size=V))
    head.init_weights(3)
    batch, packed = random_batch(), head.pack(torch.float32)
    plain, loss = (
        draft_loss(packed, batch, depth=2, depth_decay=0.5, topk_mass_weight=weight, topk=3)
        for weight in (0.0, 0.7)
    )
    expected = []
    with torch.no_grad():
        unrolled = packed.unroll(
            batch.tokens_BT[:, 1:], batch.features_BTF[:, :-1], batch.embedding_VD, 2
        )
        for k, predicted in enumerate(unrolled):
            slots = [
                (b, t)
                for b in range(B)
                for t in range(T - 2 - k)
                if batch.loss_mask_BT[b, t + 2 + k]
            ]
            true = torch.stack([batch.features_BTF[b, t + 1 + k] for b, t in slots])
            mine = torch.stack([predicted[b, t] for b, t in slots])
            log_p, log_q = (torch.log_softmax(batch.lm_head(x), -1) for x in (true, mine))
            expected.append(float(topk_mass_loss(log_p, log_q, 3)))
    assert plain.topk_mass is None
    assert loss.topk_mass is not None
    assert float(loss.topk_mass) == pytest.approx(expected[0], rel=1e-5)
    more = 0.7 * (expected[0] + expected[1] / 2) / 1.5
    assert float((loss.total - plain.total).detach()) == pytest.approx(more, rel=1e-4)


def test_acceptance_loss_counts_at_every_depth_if_weighted() -> None:
    head = DraftHead(config("qwen3", hidden_size=D, vocab_size=V))
    head.init_weights(3)
    batch, packed = random_batch(), head.pack(torch.float32)
    plain, loss = (
        draft_loss(packed, batch, depth=3, depth_decay=0.5, acceptance_weight=weight)
        for weight in (0.0, 0.7)
    )
    with torch.no_grad():
        ids, given = batch.tokens_BT[:, 1:], batch.features_BTF[:, :-1]
        unrolled = list(packed.unroll(ids, given, batch.embedding_VD, 3))
    expected = []
    for k, predicted in enumerate(unrolled):
        shares = []
        for b in range(B):
            for t in range(T - 2 - k):
                if batch.loss_mask_BT[b, t + 2 + k]:
                    mine, true = predicted[b, t].double(), batch.features_BTF[b, t + 1 + k].double()
                    lm = batch.lm_head.weight.double()
                    p, q = torch.softmax(lm @ true, -1), torch.softmax(lm @ mine, -1)
                    shares.append(-math.log(float(torch.minimum(p, q).sum())))
        expected.append(sum(shares) / len(shares))
    assert plain.acceptance is None
    assert loss.acceptance is not None
    assert float(loss.acceptance) == pytest.approx(expected[0], rel=1e-5)
    more = 0.7 * (expected[0] + expected[1] / 2 + expected[2] / 4) / 1.75
    assert float((loss.total - plain.total).detach()) == pytest.approx(more, rel=1e-4)


@pytest.mark.parametrize("eagle3", [True, False])
def test_loss_of_a_draft_vocabulary_equals_a_plain_loop(eagle3: bool) -> None:
    """The loss of a head with some of the tokens, against a loop over slots."""
    tokens, steps, sizes = [*range(0, V, 3)], 2, config("qwen3", hidden_size=D, vocab_size=V)
    head: DraftModel = Eagle3Head(sizes, (0, 1, 2), tokens) if eagle3 else DraftHead(sizes, tokens)
    head.init_weights(0)
    wide = torch.randn(B, T, 4 * D, generator=torch.Generator().manual_seed(4))
    wide = wide if eagle3 else wide[..., 3 * D :]
    batch = replace(random_batch(), features_BTF=wide)
    packed = head.pack(torch.float32)
    weights: dict[str, Any] = {"value_weight": 0.7, "soft_weight": 0.2, "acceptance_weight": 0.3}
    weights |= {"topk_mass_weight": 0.4, "topk": 3}
    loss = draft_loss(packed, batch, depth=steps, depth_decay=0.5, **weights)
    assert (loss.value is None) == eagle3
    assert torch.equal(batch.head_inputs, wide[..., : 3 * D])
    assert torch.equal(batch.final, wide[..., -D:])
    lm_head = packed.draft_lm_head(batch.lm_head)
    assert len(lm_head.weight) == len(tokens)
    total = outside = 0.0
    with torch.no_grad():
        unrolled = list(
            packed.unroll(
                batch.tokens_BT.roll(-1, -1), batch.head_inputs, batch.embedding_VD, steps
            )
        )
        for k, states in enumerate(unrolled):
            soft, accepted, held, hits, values = [], [], [], [], []
            for b in range(B):
                for t in range(T - 2 - k):
                    if not batch.loss_mask_BT[b, t + 2 + k]:
                        continue
                    true = batch.final[b, t + 1 + k]
                    values.append(float(F.smooth_l1_loss(states[b, t], true)))
                    logits = batch.lm_head(true[None])[0].double()
                    mine = packed.draft_logits(states[b, t][None], lm_head)[0].double()
                    p, q = torch.softmax(logits[tokens], -1), torch.softmax(mine, -1)
                    known = int(batch.tokens_BT[b, t + 2 + k]) in tokens
                    outside += not known
                    soft.append(-float((p * q.log()).sum()) if known else 0.0)
                    mass = torch.softmax(logits, -1)[tokens]
                    accepted.append(-float(torch.minimum(mass, q).sum().log()))
                    held.append(
                        -math.log(float(mass @ torch.tensor(membership(q.tolist(), 3)).double()))
                    )
                    hits.append(known and mine.argmax() == logits[tokens].argmax())
            mean = 0.2 * sum(soft) / len(soft) + 0.3 * sum(accepted) / len(accepted)
            mean += 0.4 * sum(held) / len(held)
            mean += 0 if eagle3 else 0.7 * sum(values) / len(values)
            total += 0.5**k * mean
            if k == 0:
                assert float(loss.accuracy) == pytest.approx(sum(hits) / len(hits))
                assert float(loss.soft) == pytest.approx(sum(soft) / len(soft), rel=1e-5)
                assert loss.acceptance is not None
                assert float(loss.acceptance) == pytest.approx(
                    sum(accepted) / len(accepted), rel=1e-5
                )
    assert outside > 5
    assert float(loss.total.detach()) == pytest.approx(total / 1.5, rel=1e-5)
