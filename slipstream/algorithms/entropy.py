"""Entropy of the policy's next-token distribution, and its bonus in the loss.

Called by training steps. Where hidden states are at hand, `log_probs.chunked_token_log_probs`
gives entropies without holding all logits.
"""

from __future__ import annotations

from torch import Tensor

from slipstream.algorithms.aggregation import LossAggMode, Normalizers, sum_loss


def entropy_loss(
    entropy: Tensor, mask: Tensor, mode: str | LossAggMode, norm: Normalizers, *, coeff: float
) -> Tensor:
    """-coeff * aggregated entropy: the term that is added to the loss to keep the policy from
    collapsing. `entropy` and `mask` are (B, T): rows of the mini-batch that `norm` counts.

    Source: Williams and Peng, 1991; in PPO: https://arxiv.org/abs/1707.06347, eq. 9.
    """
    return -coeff * sum_loss(entropy, mask, mode, norm)
