"""What a draft head is trained on: the policy's own features and distributions.

Pure functions of packed weights and tensors. Shapes: B sequences, T tokens, D hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.errors import DataError
from slipstream.models.draft_head import PackedDraftHead
from slipstream.models.linear import PackedLinear


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSamples:
    """Sequences to learn from, padded on the right.

    `features_BTD` are the policy's final hidden states, `loss_mask_BT` is 1 on tokens that the
    policy wrote. `embedding_VD` and `lm_head` are the policy's at the time of the features.
    """

    tokens_BT: Tensor
    features_BTD: Tensor
    loss_mask_BT: Tensor
    embedding_VD: Tensor
    lm_head: PackedLinear


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLoss:
    """`total` = value_weight * `value` + soft_weight * `soft`, a mean over slots.

    `accuracy`: how often the head's likeliest token is the policy's likeliest one.
    """

    total: Tensor
    value: Tensor
    soft: Tensor
    accuracy: Tensor
    slots: int


def eagle_loss(
    head: PackedDraftHead,
    batch: DraftSamples,
    *,
    value_weight: float = 1.0,
    soft_weight: float = 0.1,
) -> DraftLoss:
    """Smooth L1 between predicted and true features, and cross-entropy to the policy's own
    distribution (EAGLE, Li et al. 2024), over slots whose drafted token the policy wrote.

    Slot t holds the feature of token t and the embedding of token t + 1; its prediction is the
    feature of token t + 1, which gives the law of token t + 2. No gradient reaches the policy.
    Raises DataError for a batch without a slot to learn from.
    """
    B, T = batch.tokens_BT.shape
    positions = torch.arange(T - 1, device=batch.tokens_BT.device).expand(B, -1)
    features = batch.features_BTD.detach()
    predicted = head.forward(
        batch.tokens_BT[:, 1:], features[:, :-1], positions, batch.embedding_VD.detach()
    )
    # The last slot drafts a token beyond the sequence.
    counted = F.pad(batch.loss_mask_BT[:, 2:], (0, 1)).bool().flatten()
    slots = int(counted.sum())
    if not slots:
        raise DataError("no token of the batch can be drafted: the policy wrote none past the 2nd")
    mine = predicted.flatten(0, 1)[counted]
    true = features[:, 1:].flatten(0, 1)[counted]
    value = F.smooth_l1_loss(mine.float(), true.float())
    log_q = torch.log_softmax(batch.lm_head(mine).float(), -1)
    with torch.no_grad():
        logits = batch.lm_head(true).float()
    soft = -(torch.softmax(logits, -1) * log_q).sum(-1).mean()
    accuracy = (log_q.argmax(-1) == logits.argmax(-1)).float().mean()
    return DraftLoss(
        total=value_weight * value + soft_weight * soft,
        value=value.detach(),
        soft=soft.detach(),
        accuracy=accuracy.detach(),
        slots=slots,
    )
