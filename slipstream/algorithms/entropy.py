"""Entropy of the policy's next-token distribution, and the entropy bonus of the loss.

Training steps call this module. With hidden states instead of logits, use
`log_probs.chunked_token_log_probs`, which computes entropies without all logits in memory.
"""

from __future__ import annotations

from torch import Tensor

from slipstream.algorithms.aggregation import LossAggMode, Normalizers, sum_loss


def entropy_loss(
    entropy: Tensor, mask: Tensor, mode: str | LossAggMode, norm: Normalizers, *, coeff: float
) -> Tensor:
    """-coeff * aggregated entropy, a loss term that keeps the policy from collapsing.

    `entropy` and `mask` are (B, T), rows of the mini-batch that `norm` counts.

    Source: Williams and Peng, 1991; in PPO: https://arxiv.org/abs/1707.06347, eq. 9.
    """
    return -coeff * sum_loss(entropy, mask, mode, norm)
