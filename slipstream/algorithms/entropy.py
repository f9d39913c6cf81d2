"""Entropy of the policy's next-token distribution, and the entropy bonus of the loss.

Training steps call this module. With hidden states instead of logits, use
`log_probs.chunked_token_log_probs`, which computes entropies without all logits in memory.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from slipstream.algorithms.aggregation import LossAggMode, Normalizers, sum_loss


def entropy_from_logits(logits: Tensor, *, chunk_size: int | None = None) -> Tensor:
    """H = logsumexp(z) - sum softmax(z) z in nats, in float32 (float64 stays float64).

    `logits` are (..., V), the result is (...). Logits of -inf have probability 0 and contribute
    nothing. With `chunk_size`, forward and backward pass work on at most that many rows at once.

    Raises:
        ValueError: `chunk_size` is not positive.
    """
    if chunk_size is None:
        return _entropy(logits)
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be >= 1, got {chunk_size}")
    rows = logits.reshape(-1, logits.shape[-1])
    chunks = torch.split(rows, chunk_size)
    parts = [checkpoint(_entropy, chunk, use_reentrant=False) for chunk in chunks]
    return torch.cat(parts).reshape(logits.shape[:-1])


def entropy_loss(
    entropy: Tensor, mask: Tensor, mode: str | LossAggMode, norm: Normalizers, *, coeff: float
) -> Tensor:
    """-coeff * aggregated entropy, a loss term that keeps the policy from collapsing.

    `entropy` and `mask` are (B, T), rows of the mini-batch that `norm` counts.

    Source: Williams and Peng, 1991; in PPO: https://arxiv.org/abs/1707.06347, eq. 9.
    """
    return -coeff * sum_loss(entropy, mask, mode, norm)


def _entropy(logits: Tensor) -> Tensor:
    z = logits if logits.dtype == torch.float64 else logits.float()
    finite_z = z.masked_fill(z == -torch.inf, 0.0)
    return torch.logsumexp(z, dim=-1) - (torch.softmax(z, dim=-1) * finite_z).sum(dim=-1)
