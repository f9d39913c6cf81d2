"""Starts a new EAGLE-1/2 head as the best linear predictor of the policy's features.

An untrained head drafts as if the token after next were the next token. The ridge regression of
each feature on the feature before it and on the token's embedding is a far better start: one
system of linear equations replaces the first minutes of training. Shapes: N slots, D hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from slipstream.drafter.sequences import DraftSequence, VocabLayers, collate
from slipstream.models.decoder import Layer
from slipstream.models.draft.eagle1 import DraftHead
from slipstream.models.draft.model import DraftModel

RIDGE = 1e-3
"""The penalty on squared weights, as a share of the mean square of an input."""

MOST_SLOTS = 65536
"""The regression stops at about this number of tokens, which takes one to three seconds."""

_AT_ONCE = 16
"""Sequences whose inputs are in memory at the same time."""


@torch.no_grad()
def start_linear(head: DraftModel, sequences: Sequence[DraftSequence], vocab: VocabLayers) -> bool:
    """Set `fc` of a new head by ridge regression, and the outputs of its layer to 0.

    The regression has one equation for each token of `sequences` that can be drafted, up to about
    `MOST_SLOTS`. Returns False, without a change, for heads that predict no features (EAGLE-3), if
    there are fewer tokens than inputs, and if features are not finite.
    """
    if not isinstance(head, DraftHead):
        return False
    inputs = 2 * head.config.hidden_size
    left = torch.zeros(inputs, inputs, dtype=torch.float64, device=head.device)
    right = torch.zeros(inputs, inputs // 2, dtype=torch.float64, device=head.device)
    start = count = 0
    while start < len(sequences) and count < MOST_SLOTS:
        batch = collate(sequences[start : start + _AT_ONCE], vocab)
        slots, final = batch.slots(2), batch.final.flatten(0, 1)
        embedded = F.embedding(batch.tokens_BT.roll(-1, -1).flatten()[slots], batch.embedding_VD)
        x = torch.cat([embedded, final[slots]], -1).float()
        left += x.T @ x
        right += x.T @ final[slots + 1].float()
        start, count = start + _AT_ONCE, count + len(slots)
    if count < inputs:
        return False
    penalty = RIDGE * left.diagonal().mean()
    left += penalty * torch.eye(inputs, dtype=left.dtype, device=left.device)
    solution, info = torch.linalg.solve_ex(left, right)
    if info or not torch.isfinite(solution).all():
        return False
    head.fc.weight.copy_(solution.T)
    (layer,) = head.layers
    assert isinstance(layer, Layer)
    for outputs in (layer.self_attn.o_proj, layer.mlp.down_proj):
        outputs.weight.zero_()
    return True
