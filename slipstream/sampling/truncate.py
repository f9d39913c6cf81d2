"""Top-k, top-p and min-p with one tie rule: equal logits go to the lowest token id.

bf16 logits tie often, and sorting routines break ties in an unspecified order. Without a rule, the
result could depend on the shape of the batch.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def truncate(log_probs_NV: Tensor, top_k_N: Tensor, top_p_N: Tensor, min_p_N: Tensor) -> Tensor:
    """Return the support after top-k, top-p and min-p, applied in this order: boolean (N, V).

    `log_probs_NV` (float32) is the full log-softmax at the sampling temperature. `top_k <= 0`,
    `top_p == 1` and `min_p == 0` turn the respective rule off. Top-p keeps the smallest set of the
    most likely tokens after top-k whose renormalized mass reaches `top_p` (Holtzman et al. 2020).
    Min-p keeps tokens with at least `min_p` times the largest probability (Nguyen et al. 2024).
    The most likely token always stays.
    """
    vocab = log_probs_NV.shape[1]
    # A stable sort keeps equal values in index order: ties go to the lowest token id.
    ordered, order = torch.sort(log_probs_NV, dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab, device=log_probs_NV.device)
    limit = torch.where(top_k_N > 0, top_k_N, vocab)
    keep = rank[None, :] < limit[:, None]
    probs = torch.where(keep, ordered.to(torch.float64).exp(), 0.0)
    probs = probs / probs.sum(-1, keepdim=True)
    before = probs.cumsum(-1) - probs
    keep &= (before < top_p_N[:, None].to(torch.float64)) | (top_p_N[:, None] >= 1.0)
    keep &= probs >= min_p_N[:, None].to(torch.float64) * probs[:, :1]
    keep[:, 0] = True
    return torch.zeros_like(keep).scatter_(1, order, keep)
