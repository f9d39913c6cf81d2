"""Losses of a draft head: the distance to the policy's features and token distributions.

Pure functions of packed weights and tensors. Shapes: B sequences, T tokens, D hidden width, F width
of a feature, V vocabulary, N slots, M = B * T rows.
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
    """A training batch: sequences padded on the right, or concatenated with `lengths` and B = 1.

    `features_BTF` are the policy's hidden states: the inputs of the auxiliary layers, if the head
    reads any (`DraftModel.aux_layers`), concatenated with the final hidden states. `loss_mask_BT`
    is 1 on tokens that the policy wrote. `embedding_VD` and `lm_head` are those of the policy that
    computed the features.
    """

    tokens_BT: Tensor
    features_BTF: Tensor
    loss_mask_BT: Tensor
    embedding_VD: Tensor
    lm_head: PackedLinear
    lengths: Sequence[int] | None = None

    @property
    def head_inputs(self) -> Tensor:
        """The head's input features: auxiliary layers if it reads any, else the final states."""
        return HiddenStates.split(self.features_BTF, self.embedding_VD.shape[1]).features

    @property
    def final(self) -> Tensor:
        """The final hidden states (B, T, D)."""
        return HiddenStates.split(self.features_BTF, self.embedding_VD.shape[1]).final

    def positions(self) -> tuple[Tensor, Tensor, Tensor]:
        """For each row (M,): index of its sequence, position in it, and number of rows after it."""
        B, T = self.tokens_BT.shape
        device = self.tokens_BT.device
        if self.lengths is None:
            position = torch.arange(T, device=device).repeat(B)
            return torch.arange(B, device=device).repeat_interleave(T), position, T - 1 - position
        each = torch.tensor(self.lengths, device=device)
        sequence = torch.arange(len(each), device=device).repeat_interleave(each)
        position = torch.arange(T, device=device) - (each.cumsum(0) - each)[sequence]
        return sequence, position, each[sequence] - 1 - position

    def slots(self, distance: int) -> Tensor:
        """Indices of the rows that are `distance` tokens before a token that the policy wrote."""
        _, _, left = self.positions()
        mask = self.loss_mask_BT.flatten().roll(-distance)
        return ((left >= distance) & mask.bool()).nonzero()[:, 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLoss:
    """`total` = value_weight * `value` + soft_weight * `soft` + acceptance_weight * `acceptance` +
    topk_mass_weight * `topk_mass`, a mean over slots and a weighted mean over depths.

    The single losses and `accuracy` are those of the first draft token. `value` is None for a head
    that predicts no features; `acceptance` and `topk_mass` are None if their weight is 0. Accuracy
    is the share of slots where the head's likeliest token is the policy's likeliest token. With a
    draft vocabulary, it compares draft tokens only, and a slot whose written token is outside is
    wrong.
    `slots` is the number of slots of the first depth.
    """

    total: Tensor
    value: Tensor | None
    soft: Tensor
    acceptance: Tensor | None
    topk_mass: Tensor | None
    accuracy: Tensor
    slots: int


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
    """The training loss of a draft head on a batch.

    The soft loss is the cross-entropy from the policy's distribution to the head's. It is averaged
    over the slots whose drafted token the policy wrote. A head that predicts features also gets the
    value loss, smooth L1 between predicted and true features (EAGLE, Li et al. 2024).
    `acceptance_weight` adds `acceptance_loss`, `topk_mass_weight` adds `topk_mass_loss` with `topk`
    candidates. All distributions are at temperature 1. No gradient reaches the policy.

    Slot t has the feature of token t and the embedding of token t + 1; its output state predicts
    token t + 2. With `depth` above 1 the head also drafts `depth` tokens from its own states
    (`PackedDraft.unroll`). Depth k, counted from 0, has weight `depth_decay`^k in a weighted mean
    (EAGLE-3's training-time test, Li et al. 2025; HASS, Zhang et al. 2024). `noise` is added to the
    head's input features, not to the features to predict.

    For a head with a draft vocabulary, the soft loss compares distributions over its tokens only,
    and slots whose written token is outside count as 0. (EAGLE-3's published training judges by the
    policy's likeliest token instead. That needs logits of all tokens, which cost more than all the
    rest.) The acceptance and top-k mass losses use the policy's full distribution.

    Raises DataError for a batch without slots, ValueError if `topk` is not below the size of the
    (draft) vocabulary.
    """
    inputs = batch.head_inputs.detach()
    final = batch.final.detach().flatten(0, 1)
    unrolled = head.unroll(
        batch.tokens_BT.roll(-1, -1),
        inputs if noise is None else inputs + noise,
        batch.embedding_VD.detach(),
        depth,
        lengths=batch.lengths,
    )
    total = torch.zeros((), device=inputs.device)
    weights, first = 0.0, None
    lm_head = head.draft_lm_head(batch.lm_head)
    policy_lm_head, is_draftable = batch.lm_head, None
    if head.tokens is not None:
        policy_lm_head = batch.lm_head.rows(head.tokens)
        draftable = torch.zeros(head.config.vocab_size, dtype=torch.bool, device=inputs.device)
        is_draftable = draftable.index_fill_(0, head.tokens, True)[batch.tokens_BT.flatten()]
    for k, states in enumerate(unrolled):
        # Slot t drafts token t + 2 + k. `slots` leaves out the last ones, which draft a token
        # beyond the sequence.
        counted = batch.slots(2 + k)
        if not len(counted):
            break
        mine, true = states.flatten(0, 1)[counted], final[counted + 1 + k]
        log_q = torch.log_softmax(head.draft_logits(mine, lm_head).float(), -1)
        counts = None if is_draftable is None else is_draftable[counted + 2 + k].float()
        with torch.no_grad():
            theirs = policy_lm_head(true).float()
            likeliest = theirs.argmax(-1)
        soft = -(torch.softmax(theirs, -1) * log_q).sum(-1)
        soft = (soft if counts is None else soft * counts).mean()
        weighted = soft_weight * soft
        value = acceptance = topk_mass = None
        if head.predicts_features:
            value = F.smooth_l1_loss(mine.float(), true.float())
            weighted = weighted + value_weight * value
        if acceptance_weight or topk_mass_weight:
            log_p = _log_probs(batch.lm_head, true, head.tokens)
        if acceptance_weight:
            acceptance = acceptance_loss(log_p, log_q)
            weighted = weighted + acceptance_weight * acceptance
        if topk_mass_weight:
            topk_mass = topk_mass_loss(log_p, log_q, topk)
            weighted = weighted + topk_mass_weight * topk_mass
        weight = depth_decay**k
        total = total + weight * weighted
        weights += weight
        if first is None:
            same = (log_q.argmax(-1) == likeliest).float()
            accuracy = (same if counts is None else same * counts).mean()
            optional = _detached(acceptance), _detached(topk_mass)
            first = (_detached(value), soft.detach(), *optional, len(counted), accuracy)
    if first is None:
        raise DataError(
            "no token of the batch can be drafted: the policy wrote no token after the 2nd one of "
            "a sequence"
        )
    return DraftLoss(
        total=total / weights,
        value=first[0],
        soft=first[1],
        acceptance=first[2],
        topk_mass=first[3],
        accuracy=first[5],
        slots=first[4],
    )


@torch.no_grad()
def _log_probs(lm_head: PackedLinear, final: Tensor, tokens: Tensor | None) -> Tensor:
    """Return the policy's log-probs of `tokens` (Z,), or of all tokens, at final states (N, D)."""
    log_p = torch.log_softmax(lm_head(final).float(), -1)
    return log_p if tokens is None else log_p[:, tokens]


def _detached(loss: Tensor | None) -> Tensor | None:
    return None if loss is None else loss.detach()


def acceptance_loss(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Mean over rows of -log sum_v min(p(v), q(v)), in nats.

    `log_p` (policy) and `log_q` (head) are log-probs (N, V); V may be a part of the vocabulary. The
    sum is 1 - TV(p, q), the probability that speculative sampling (Leviathan et al. 2023) accepts a
    draft token from q under the policy p. Drafts with shared Gumbel noise are accepted with
    probability at least (1 - TV) / (1 + TV). The logarithm keeps the gradient large even if
    acceptance is rare (the alpha form of LK losses, Samarin et al. 2026, arXiv 2602.23881).
    """
    return -torch.logsumexp(torch.minimum(log_p, log_q), -1).mean()


def topk_mass_loss(log_p: Tensor, log_q: Tensor, topk: int) -> Tensor:
    """Mean over rows of -log sum_v p(v) m(v), in nats, for log-probs (N, V) as in
    `acceptance_loss`.

    m(v) is the probability that v is among the head's `topk` candidates: the tokens with the
    highest log q + G, with Gumbel noise G. The loss is a smooth version of the policy's probability
    mass on the head's best `topk` tokens, the acceptance probability of one level of a draft tree.
    That mass itself has no gradient, because the set of best tokens changes in jumps.

    Given the threshold c that the last candidate passes, v is among the candidates with probability
    1 - exp(-q(v) / c) (Kool et al. 2019, arXiv 1903.06059, section 3.3). Here c is chosen so that
    these probabilities add up to `topk`. If the head's best tokens are far apart, the sum equals
    the mass.

    Raises ValueError if `topk` is not below V.
    """
    if topk >= log_q.shape[-1]:
        raise ValueError(f"topk={topk} must be below the vocabulary's {log_q.shape[-1]} tokens")
    log_m = _log_membership(log_q - _log_threshold(log_q, topk))
    return -torch.logsumexp(log_p + log_m, -1).mean()


_MAX_LOG = 10.0
"""exp(-exp(x)) underflows to 0 above this."""

_SMALL = 1e-3
"""Below this, log(1 - exp(-x)) is computed by its series."""

_HALVINGS = 16
"""Bisection steps before one Newton step, which squares the remaining relative error."""


def _log_threshold(log_q: Tensor, topk: int) -> Tensor:
    """log c (N, 1) with sum_v (1 - exp(-q(v) / c)) = `topk`, differentiable."""
    with torch.no_grad():
        # Bounds: 1 - exp(-x) <= x gives the upper one. For the lower one, topk + 1 tokens with at
        # least the probability of the (topk + 1)-th best already add up to topk.
        high = torch.full_like(log_q[:, :1], -math.log(topk))
        next_best = log_q.topk(topk + 1, -1).values[:, topk:]
        low = next_best - math.log(math.log(topk + 1))
        for _ in range(_HALVINGS):
            threshold = (low + high) / 2
            more = -torch.expm1(-torch.exp(log_q - threshold)).sum(-1, keepdim=True) > topk
            low, high = torch.where(more, threshold, low), torch.where(more, high, threshold)
    # One Newton step, which also gives the gradient of the implicit function.
    x = (log_q - low).clamp(max=_MAX_LOG).exp()
    members = -torch.expm1(-x).sum(-1, keepdim=True)
    slope = (x * torch.exp(-x)).detach().sum(-1, keepdim=True)
    return low + (members - topk) / slope


def _log_membership(log_ratio: Tensor) -> Tensor:
    """log(1 - exp(-exp(log_ratio))), stable for small and large arguments."""
    log_ratio = log_ratio.clamp(max=_MAX_LOG)
    x = log_ratio.exp()
    return torch.where(
        x < _SMALL, log_ratio - x / 2, torch.log(-torch.expm1(-x.clamp(min=_SMALL / 2)))
    )
