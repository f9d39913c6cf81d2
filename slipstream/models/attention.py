"""Causal attention with grouped query heads, in exact mode.

Row i of the result depends on query i and on keys at positions <= i, bit for bit, and on nothing
else: not on the batch, not on how many queries are asked at once, not on padding. Three rules do
it: query rows come in fours, key widths in steps (`numerics.key_step`), and the sum over keys is
taken chunk by chunk in the order of positions (what lies in the future adds exact zeros).

Shapes: B sequences, T queries, S keys (padded), H key-value heads, G query heads per key-value
head, N = B * H, K head width, R = G * T folded query rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.models.numerics import KEY_CHUNK, ROW_MULTIPLE, key_step, round_up


def causal_mask(
    query_positions_BT: Tensor, num_keys: int, num_kv_heads: int, group_size: int
) -> Tensor:
    """Additive mask (B * H, R, S) for queries at the given positions over keys 0 .. num_keys - 1.

    0 where a key may be seen, -inf elsewhere. R is `group_size * T` rounded up to the row multiple;
    rows beyond are copies of the first and are dropped again after `attend`.
    """
    B, T = query_positions_BT.shape
    keys = torch.arange(num_keys, device=query_positions_BT.device)
    hidden_BTS = keys[None, None, :] > query_positions_BT[:, :, None]
    mask_BTS = torch.zeros(B, T, num_keys, device=keys.device)
    mask_BTS.masked_fill_(hidden_BTS, float("-inf"))
    rows = pad_query_rows(mask_BTS[:, None].repeat(1, 1, group_size, 1))
    return rows.expand(B, num_kv_heads, -1, -1).reshape(B * num_kv_heads, -1, num_keys)


def pad_query_rows(x: Tensor) -> Tensor:
    """(B, H, R, X) -> (B, H, R', X), R' a multiple of the row multiple, filled with row 0."""
    missing = -x.shape[2] % ROW_MULTIPLE
    if not missing:
        return x
    return torch.cat([x, x[:, :, :1].expand(-1, -1, missing, -1)], dim=2)


def padded_keys(length: int, dtype: torch.dtype, device: torch.device) -> int:
    """How many key slots attention to `length` positions takes."""
    return round_up(max(length, 1), key_step(dtype, device))


def attend(q_BHRK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, mask_NRS: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(K) + mask) v, (B, H, R, K) in the dtype of `q`.

    `R` and `S` must obey the rules of rows and keys (see the module docstring). The numerator is
    summed over chunks in order of position, in fp32. The denominator is summed in fp64, so that
    permuting keys cannot move the result.
    """
    B, H, R, K = q_BHRK.shape
    S = k_BHSK.shape[2]
    chunk = KEY_CHUNK[q_BHRK.dtype]
    q = q_BHRK.reshape(B * H, R, K)
    k = k_BHSK.reshape(B * H, S, K)
    v = v_BHSK.reshape(B * H, S, K)
    if q.dtype == torch.float32:
        scores = torch.baddbmm(mask_NRS, q, k.transpose(1, 2), alpha=K**-0.5)
    else:
        scores = torch.bmm(q, k.transpose(1, 2)).float() * K**-0.5 + mask_NRS
    # In place: at the size of the scores, memory is what costs.
    weights = scores.sub_(scores.detach().amax(-1, keepdim=True)).exp_()
    mass = weights.sum(-1, keepdim=True, dtype=torch.float64).float()
    weights = weights.to(v.dtype)
    total = torch.bmm(weights[:, :, :chunk], v[:, :chunk]).float()
    for start in range(chunk, S, chunk):
        part, values = weights[:, :, start : start + chunk], v[:, start : start + chunk]
        if v.dtype == torch.float32:
            total = torch.baddbmm(total, part, values)
        else:
            total = total + torch.bmm(part, values).float()
    return (total / mass).to(q.dtype).view(B, H, R, K)
