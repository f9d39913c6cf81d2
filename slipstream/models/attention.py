"""Causal attention with grouped query heads, in exact mode.

Row i of the result depends on query i and on keys at positions <= i, bit for bit, and on nothing
else: not on the batch, not on how many queries are asked at once, not on padding. Three rules do
it: query rows come in fours, key widths in steps (`numerics.key_step`), and the sum over keys is
taken chunk by chunk in the order of positions (what lies in the future adds exact zeros).

Shapes: B sequences, T queries, S keys (padded), H key-value heads, G query heads per key-value
head, N = B * H, K head width, R = G * T folded query rows, X keys that not all queries see.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.models.numerics import (
    KEY_CHUNK,
    ROW_MULTIPLE,
    WIDTH_MULTIPLE,
    key_step,
    round_up,
)


def causal_mask(
    query_positions_BT: Tensor, num_keys: int, num_kv_heads: int, group_size: int, num_seen: int = 0
) -> Tensor:
    """Additive mask (B * H, R, X) for queries at the given positions over the last X keys.

    0 where a key may be seen, -inf elsewhere. Every query sees the first `num_seen` keys, X is
    `num_keys - num_seen`. R is `group_size * T` rounded up to the row multiple; rows beyond are
    copies of the first and are dropped again after `attend`.
    """
    B = query_positions_BT.shape[0]
    keys = torch.arange(num_seen, num_keys, device=query_positions_BT.device)
    hidden_BTX = keys[None, None, :] > query_positions_BT[:, :, None]
    mask_BTX = torch.zeros(hidden_BTX.shape, device=keys.device)
    mask_BTX.masked_fill_(hidden_BTX, float("-inf"))
    rows = pad_query_rows(mask_BTX[:, None].repeat(1, 1, group_size, 1))
    R, X = rows.shape[2:]
    return rows.expand(B, num_kv_heads, R, X).reshape(B * num_kv_heads, R, X)


def pad_query_rows(x: Tensor) -> Tensor:
    """(B, H, R, X) -> (B, H, R', X), R' a multiple of the row multiple, filled with row 0."""
    missing = -x.shape[2] % ROW_MULTIPLE
    if not missing:
        return x
    return torch.cat([x, x[:, :, :1].expand(-1, -1, missing, -1)], dim=2)


def padded_keys(length: int, dtype: torch.dtype, device: torch.device) -> int:
    """How many key slots attention to `length` positions takes."""
    return round_up(max(length, 1), key_step(dtype, device))


def attend(q_BHRK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, mask_NRX: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(K) + mask) v, (B, H, R, K) in the dtype of `q`.

    `R` and `S` must obey the rules of rows and keys (see the module docstring); the mask covers the
    last X of the S keys. Numerator and denominator are summed in order of position, so that keys of
    weight zero in between cannot move the result: in fp32 as matrix products, chunk by chunk; the
    denominator of bf16, whose products are rounded, in fp64.
    """
    B, H, R, K = q_BHRK.shape
    S = k_BHSK.shape[2]
    chunk = KEY_CHUNK[q_BHRK.dtype]
    q = q_BHRK.reshape(B * H, R, K)
    k = k_BHSK.reshape(B * H, S, K)
    v = v_BHSK.reshape(B * H, S, K)
    # In place from here on: at the size of the scores, memory is what costs.
    if q.dtype == torch.float32:
        scores = torch.bmm(q * K**-0.5, k.transpose(1, 2))
    else:
        scores = torch.bmm(q, k.transpose(1, 2)).float().mul_(K**-0.5)
    scores[:, :, S - mask_NRX.shape[-1] :].add_(mask_NRX)
    weights = scores.sub_(scores.detach().amax(-1, keepdim=True)).exp_()
    if q.dtype == torch.float32:
        return _weighted_mean(weights, v, chunk).view(B, H, R, K)
    mass = weights.sum(-1, keepdim=True, dtype=torch.float64).float()
    weights = weights.to(v.dtype)
    total = torch.bmm(weights[:, :, :chunk], v[:, :chunk]).float()
    for start in range(chunk, S, chunk):
        part, values = weights[:, :, start : start + chunk], v[:, start : start + chunk]
        total = total + torch.bmm(part, values).float()
    return (total / mass).to(q.dtype).view(B, H, R, K)


def _weighted_mean(weights_NRS: Tensor, v_NSK: Tensor, chunk: int) -> Tensor:
    """Mean of values (N, R, K) under weights that do not add up to 1, all in fp32."""
    N, R, S = weights_NRS.shape
    # A product with ones adds in order; `sum` would add lane by lane, which draft trees permute.
    ones = weights_NRS.new_ones(min(chunk, S), WIDTH_MULTIPLE)
    flat = weights_NRS.view(N * R, S)
    total = torch.bmm(weights_NRS[:, :, :chunk], v_NSK[:, :chunk])
    mass = torch.mm(flat[:, :chunk], ones)
    for start in range(chunk, S, chunk):
        keys = slice(start, min(start + chunk, S))
        total = torch.baddbmm(total, weights_NRS[:, :, keys], v_NSK[:, keys])
        mass = torch.addmm(mass, flat[:, keys], ones[: keys.stop - start])
    return total / mass.view(N, R, -1)[:, :, :1]
