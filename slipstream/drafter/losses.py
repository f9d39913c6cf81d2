"""What a draft head is trained on: the policy's own features and distributions.

Pure functions of packed weights and tensors. Shapes: B sequences, T tokens, D hidden width, F width
of a feature, M = B * T rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.errors import DataError
from slipstream.models.decoder import HiddenStates
from slipstream.models.draft.model import PackedDraft
from slipstream.models.linear import PackedLinear


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSamples:
    """Sequences to learn from: padded on the right, or with `lengths` one after another, B = 1.

    `features_BTF` are the policy's hidden states: those that a head reads, if it does
    (`DraftModel.aux_layers`), and then the final ones, side by side; `loss_mask_BT` is 1 on tokens
    that
    the policy wrote. `embedding_VD` and `lm_head` are the policy's at the time of the features.
    """

    tokens_BT: Tensor
    features_BTF: Tensor
    loss_mask_BT: Tensor
    embedding_VD: Tensor
    lm_head: PackedLinear
    lengths: Sequence[int] | None = None

    @property
    def given(self) -> Tensor:
        """What a head is given: auxiliary layers, else the final hidden states."""
        return HiddenStates.split(self.features_BTF, self.embedding_VD.shape[1]).features

    @property
    def final(self) -> Tensor:
        """The final hidden states."""
        return HiddenStates.split(self.features_BTF, self.embedding_VD.shape[1]).final

    def places(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of each row (M,): its sequence, its place there, and how many rows come after it."""
        B, T = self.tokens_BT.shape
        device = self.tokens_BT.device
        if self.lengths is None:
            place = torch.arange(T, device=device).repeat(B)
            return torch.arange(B, device=device).repeat_interleave(T), place, T - 1 - place
        each = torch.tensor(self.lengths, device=device)
        sequence = torch.arange(len(each), device=device).repeat_interleave(each)
        place = torch.arange(T, device=device) - (each.cumsum(0) - each)[sequence]
        return sequence, place, each[sequence] - 1 - place

    def drafted(self, by: int) -> Tensor:
        """Rows `by` tokens before one that the policy wrote, as indices."""
        _, _, left = self.places()
        mask = self.loss_mask_BT.flatten().roll(-by)
        return ((left >= by) & mask.bool()).nonzero()[:, 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLoss:
    """`total` = value_weight * `value` + soft_weight * `soft` + acceptance_weight * `acceptance` +
    topk_mass_weight * `topk_mass`, a mean over slots.

    `value` (None of a head that predicts no features), `soft`, `acceptance` and `topk_mass` (None
    where they have no weight) and `accuracy` are those of the first draft, `depth_accuracy` has
    that of every depth.
    Accuracy: how often the head's likeliest token is the policy's likeliest one.
    """

    total: Tensor
    value: Tensor | None
    soft: Tensor
    acceptance: Tensor | None
    topk_mass: Tensor | None
    accuracy: Tensor
    slots: int
    depth_accuracy: Sequence[Tensor]


def draft_loss(
    head: PackedDraft,
    batch: DraftSamples,
    *,
    value_weight: float = 1.0,
    soft_weight: float = 0.1,
    acceptance_weight: float = 0.0,
    topk_mass_weight: float = 0.0,
    topk: int = 1,
    depth: int = 1,
    depth_decay: float = 1.0,
    noise: Tensor | None = None,
) -> DraftLoss:
    """Cross-entropy to the policy's own distribution over slots whose drafted token the policy
    wrote; for a head that predicts features also smooth L1 between these and true ones (EAGLE, Li
    et al. 2024). With `acceptance_weight` also `acceptance_loss`, and with `topk_mass_weight`
    `topk_mass_loss` of `topk` candidates. Distributions are those of temperature 1.

    Slot t holds the feature of token t and the embedding of token t + 1; its state gives the law of
    token t + 2. No gradient reaches the policy. With `depth` above 1 the head also drafts from its
    own states, so many tokens far (`PackedDraft.unroll`), and depth k, from 0, counts
    `depth_decay`^k in a weighted mean (EAGLE-3's training-time test, Li et al. 2025; HASS, Zhang et
    al. 2024). `noise` is added to the features that the head is given, not to those that it is
    to predict.

    Of a head with a draft vocabulary, both distributions are those among its tokens, and slots
    whose likeliest token is none of them count nothing (as in EAGLE-3's published training); what
    is accepted, and what candidates hold, counts with the policy's whole distribution.

    Raises DataError for a batch without a slot to learn from, ValueError where `topk_mass_loss`
    does.
    """
    given = batch.given.detach()
    final = batch.final.detach().flatten(0, 1)
    unrolled = head.unroll(
        batch.tokens_BT.roll(-1, -1),
        given if noise is None else given + noise,
        batch.embedding_VD.detach(),
        depth,
        lengths=batch.lengths,
    )
    total = torch.zeros((), device=given.device)
    weights, first, accuracies = 0.0, None, list[Tensor]()
    for k, states in enumerate(unrolled):
        # Slot t drafts token t + 2 + k, and the last ones one beyond the sequence.
        counted = batch.drafted(2 + k)
        if not len(counted):
            break
        mine, true = states.flatten(0, 1)[counted], final[counted + 1 + k]
        log_q = torch.log_softmax(head.draft_logits(mine, batch.lm_head).float(), -1)
        with torch.no_grad():
            logits = batch.lm_head(true).float()
            likeliest, theirs, counts = logits.argmax(-1), logits, None
            if head.tokens is not None:
                theirs = logits[:, head.tokens]
                counts = torch.isin(likeliest, head.tokens).float()
        soft = -(torch.softmax(theirs, -1) * log_q).sum(-1)
        soft = (soft if counts is None else soft * counts).mean()
        weighted = soft_weight * soft
        value = acceptance = topk_mass = None
        if head.predicts_features:
            value = F.smooth_l1_loss(mine.float(), true.float())
            weighted = weighted + value_weight * value
        if acceptance_weight or topk_mass_weight:
            log_p = torch.log_softmax(logits, -1)
            if head.tokens is not None:
                log_p = log_p[:, head.tokens]
        if acceptance_weight:
            acceptance = acceptance_loss(log_p, log_q)
            weighted = weighted + acceptance_weight * acceptance
        if topk_mass_weight:
            topk_mass = topk_mass_loss(log_p, log_q, topk)
            weighted = weighted + topk_mass_weight * topk_mass
        drafted = log_q.argmax(-1)
        if head.tokens is not None:
            drafted = head.tokens[drafted]
        weight = depth_decay**k
        total = total + weight * weighted
        weights += weight
        accuracies.append((drafted == likeliest).float().mean())
        if first is None:
            some = _shown(acceptance), _shown(topk_mass)
            first = (_shown(value), soft.detach(), *some, len(counted))
    if first is None:
        raise DataError("no token of the batch can be drafted: the policy wrote none past the 2nd")
    return DraftLoss(
        total=total / weights,
        value=first[0],
        soft=first[1],
        acceptance=first[2],
        topk_mass=first[3],
        accuracy=accuracies[0],
        slots=first[4],
        depth_accuracy=accuracies,
    )


def _shown(loss: Tensor | None) -> Tensor | None:
    return None if loss is None else loss.detach()


def acceptance_loss(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Mean over rows of -log sum_v min(p(v), q(v)), in nats, of log-probabilities (N, V), which
    may be those of some tokens only.

    The sum, 1 - TV(p, q), is how often speculative sampling (Leviathan et al. 2023) keeps a draft
    from q where the policy's distribution is p; drafts by shared noise are kept in at least
    (1 - TV) / (1 + TV) of the cases. Its logarithm has a gradient however rarely that is (the
    alpha form of LK losses, Samarin et al. 2026, arXiv 2602.23881).
    """
    return -torch.logsumexp(torch.minimum(log_p, log_q), -1).mean()


def topk_mass_loss(log_p: Tensor, log_q: Tensor, topk: int) -> Tensor:
    """Mean over rows of -log sum_v p(v) m(v), in nats, of log-probabilities (N, V) as in
    `acceptance_loss`; m(v) is how likely v is among the head's `topk` candidates, the best of
    log q + G with Gumbel noise G.

    The policy's mass on the head's best tokens is what a tree's level finds, and has no gradient:
    the set of them changes by jumps. Given the level c that the last candidate passes, v is one of
    them with 1 - exp(-q(v) / c) (Kool et al. 2019, arXiv 1903.06059, section 3.3); here c is what
    makes these add up to `topk`. Of a head whose best tokens are far apart, the sum is the mass.

    Raises ValueError where no token is left beside `topk`.
    """
    if topk >= log_q.shape[-1]:
        raise ValueError(f"{topk} candidates of {log_q.shape[-1]} tokens leave none out")
    log_m = _log_among(log_q - _log_level(log_q, topk))
    return -torch.logsumexp(log_p + log_m, -1).mean()


_SURE = 10.0
"""exp(-exp(10)) is no longer a number."""

_SMALL = 1e-3

_HALVINGS = 16
"""Newton's step squares what they leave of the distance."""


def _log_level(log_q: Tensor, topk: int) -> Tensor:
    """log c (N, 1) with sum_v (1 - exp(-q(v) / c)) = `topk`, differentiable."""
    with torch.no_grad():
        # 1 - exp(-x) is at most x, and topk + 1 tokens that are as likely would be enough.
        high = torch.full_like(log_q[:, :1], -math.log(topk))
        next_best = log_q.topk(topk + 1, -1).values[:, topk:]
        low = next_best - math.log(math.log(topk + 1))
        for _ in range(_HALVINGS):
            level = (low + high) / 2
            more = -torch.expm1(-torch.exp(log_q - level)).sum(-1, keepdim=True) > topk
            low, high = torch.where(more, level, low), torch.where(more, high, level)
    # One step of Newton's, which also has the gradient of the implicit function.
    x = (log_q - low).clamp(max=_SURE).exp()
    among = -torch.expm1(-x).sum(-1, keepdim=True)
    slope = (x * torch.exp(-x)).detach().sum(-1, keepdim=True)
    return low + (among - topk) / slope


def _log_among(beyond: Tensor) -> Tensor:
    """log(1 - exp(-exp(beyond)))."""
    beyond = beyond.clamp(max=_SURE)
    x = beyond.exp()
    return torch.where(
        x < _SMALL, beyond - x / 2, torch.log(-torch.expm1(-x.clamp(min=_SMALL / 2)))
    )
