"""Causal grouped-query attention in exact mode, by torch's operations.

`cpu_attention` does the same by compiled kernels. Row i of the result depends, bit for bit, only on
query i and on the keys at positions <= i. It does not depend on the batch, on the number of queries
or on padding. Three rules ensure this. Query rows come in multiples of four. The number of keys is
rounded up (`numerics.key_step`). The sum over keys runs chunk by chunk in the order of positions,
and future keys add exact zeros.

Shapes: B sequences, T queries, S keys (padded), Q query heads, H key-value heads, G = Q / H,
N = B * H, K head width, R = G * T folded query rows (padded), X keys that some query does not see,
P slots on a path through a draft tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.models.config import ModelConfig
from slipstream.models.functional import rms_norm, rope_at, rotate
from slipstream.models.numerics import (
    KEY_CHUNK,
    ROW_MULTIPLE,
    WIDTH_MULTIPLE,
    key_step,
    round_up,
    sums_in_key_order,
)

SCORE_BOUND = 40.0
"""For scores within this bound, exponentials and their sums stay well within fp32's range."""


def causal_mask(
    query_positions_BT: Tensor, num_keys: int, num_kv_heads: int, group_size: int, num_seen: int = 0
) -> Tensor:
    """Return the additive causal mask (B * H, R, X) over the last X keys.

    It is 0 for keys that a query sees and -inf for others. Every query sees the first `num_seen`
    keys, and X is `num_keys - num_seen`. R is `group_size * T` rounded up to the row multiple. The
    padding rows are copies of the first row, and `unfold_queries` drops them.
    """
    keys = torch.arange(num_seen, num_keys, device=query_positions_BT.device)
    hidden_BTX = keys[None, None, :] > query_positions_BT[:, :, None]
    return _additive(hidden_BTX, num_kv_heads, group_size)


def path_mask(paths_BTP: Tensor, num_keys: int, num_kv_heads: int, group_size: int) -> Tensor:
    """Return the additive mask over all keys for queries on paths through draft trees.

    Shapes are as in `causal_mask`. A query sees all slots of the stem, and after it only the slots
    on its own path (`KVCache.paths`).
    """
    keys = torch.arange(num_keys, device=paths_BTP.device)
    hidden_BTS = keys >= paths_BTP[..., :1]
    # Shorter paths are padded with slot 0, which all queries see.
    hidden_BTS = hidden_BTS.scatter(2, paths_BTP[..., 1:], False)
    return _additive(hidden_BTS, num_kv_heads, group_size)


def _additive(hidden_BTX: Tensor, num_kv_heads: int, group_size: int) -> Tensor:
    """Return -inf for hidden keys and 0 for others, (B, T, X) -> (B * H, R, X)."""
    mask_BTX = torch.zeros(hidden_BTX.shape, device=hidden_BTX.device)
    mask_BTX.masked_fill_(hidden_BTX, float("-inf"))
    rows = pad_query_rows(mask_BTX[:, None].repeat(1, 1, group_size, 1))
    B, _, R, X = rows.shape
    return rows.expand(B, num_kv_heads, R, X).reshape(B * num_kv_heads, R, X)


def pad_query_rows(x: Tensor) -> Tensor:
    """Pad with copies of row 0: (B, H, R, X) -> (B, H, R', X), R' a multiple of ROW_MULTIPLE."""
    missing = -x.shape[2] % ROW_MULTIPLE
    if not missing:
        return x
    return torch.cat([x, x[:, :, :1].expand(-1, -1, missing, -1)], dim=2)


def padded_keys(length: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return the number of key slots, with padding, that attention to `length` positions needs."""
    return round_up(max(length, 1), key_step(dtype, device))


def fold_queries(q_BTQK: Tensor, num_kv_heads: int) -> Tensor:
    """Fold the query heads of each key-value head into rows: (B, T, Q, K) -> (N, R, K).

    Rows are ordered head by head and padded to the row multiple.
    """
    B, T, Q, K = q_BTQK.shape
    heads = q_BTQK.view(B, T, num_kv_heads, Q // num_kv_heads, K).permute(0, 2, 3, 1, 4)
    return pad_query_rows(heads.reshape(B, num_kv_heads, -1, K)).reshape(B * num_kv_heads, -1, K)


def unfold_queries(x_NRK: Tensor, num_queries: int, num_kv_heads: int, group_size: int) -> Tensor:
    """Undo `fold_queries`: (N, R, K) -> (B * T, Q * K), the input of a matrix product."""
    _, R, K = x_NRK.shape
    rows = x_NRK.view(-1, num_kv_heads, R, K)[:, :, : group_size * num_queries]
    heads = rows.view(-1, num_kv_heads, group_size, num_queries, K).permute(0, 3, 1, 2, 4)
    return heads.reshape(-1, num_kv_heads * group_size * K)


class Context(NamedTuple):
    """The keys and values of one layer in the form that `attend` needs."""

    keys_NKS: Tensor
    values: Sequence[Tensor]
    """(N, S, K) split into chunks along S."""


def as_context(k_NSK: Tensor, v_NSK: Tensor) -> Context:
    """Return views of keys and values for `attend`; S must be a number from `padded_keys`."""
    return Context(k_NSK.transpose(1, 2), torch.split(v_NSK, KEY_CHUNK[v_NSK.dtype], dim=1))


class KVCache(Protocol):
    """An engine's store of keys and values.

    The key of position i is in slot i, except for nodes of a draft tree.
    """

    @property
    def num_keys(self) -> int:
        """Number of key slots that `extend` returns, as `padded_keys` computes it."""
        ...

    @property
    def num_seen(self) -> int:
        """Every query of this pass sees the first `num_seen` slots; a multiple of 16."""
        ...

    @property
    def paths(self) -> Tensor | None:
        """The queries' paths through draft trees, (B, T, 1 + P); None without trees.

        The first number of a query is its stem: the number of leading slots that it sees. The
        others are the slots on its path after the stem, in the order of positions.
        """
        ...

    def extend(self, layer: int, k_BTHK: Tensor, v_BTHK: Tensor) -> Context:
        """Store new keys and values of one layer; return all keys and values of the layer."""
        ...


class TorchAttention:
    """The attention of one forward pass by torch's operations, for any device and dtype."""

    def __init__(
        self,
        config: ModelConfig,
        eps: Tensor,
        positions_BT: Tensor,
        dtype: torch.dtype,
        kv_cache: KVCache | None = None,
    ) -> None:
        """Set up masks and rotations for queries at `positions_BT`.

        Each query sees the keys up to its own position, or on its path (`KVCache.paths`).
        """
        self._c, self._eps, self._kv_cache = config, eps, kv_cache
        H, G = config.num_kv_heads, config.group_size
        if kv_cache is None:
            num_keys, seen = padded_keys(positions_BT.shape[1], dtype, positions_BT.device), 0
        else:
            num_keys, seen = kv_cache.num_keys, kv_cache.num_seen
        self._num_keys = num_keys
        self._order: Order | None = None
        paths = None if kv_cache is None else kv_cache.paths
        in_order = sums_in_key_order(positions_BT.device)
        if paths is not None and in_order:
            self._order = Order.of(paths, positions_BT, num_keys, H, G)
        if paths is None or in_order:
            self._mask_NRX = causal_mask(positions_BT, num_keys, H, G, seen)
        else:
            self._mask_NRX = path_mask(paths, num_keys, H, G)
        self._cos, self._sin = rope_at(positions_BT, config, dtype)

    def __call__(self, index: int, qkv: Tensor, norms: Tensor | None, bounded: bool) -> Tensor:
        """Return the attention output: (M, (Q + 2H) * K) -> (M, Q * K)."""
        c = self._c
        B, T = self._cos.shape[:2]
        Q, H = c.num_heads, c.num_kv_heads
        qk, v = qkv.view(B, T, Q + 2 * H, c.head_dim).split_with_sizes([Q + H, H], 2)
        if norms is not None:
            qk = rms_norm(qk, norms, self._eps)
        q, k = rotate(qk, self._cos, self._sin).split_with_sizes([Q, H], 2)
        if self._kv_cache is None:
            context = as_context(_pad_keys(k, self._num_keys), _pad_keys(v, self._num_keys))
        else:
            context = self._kv_cache.extend(index, k, v)
        attended = attend(fold_queries(q, H), context, self._mask_NRX, bounded, self._order)
        return unfold_queries(attended, T, H, c.group_size)


def _pad_keys(x_BTHK: Tensor, num_keys: int) -> Tensor:
    """Pad keys or values with zeros: (B, T, H, K) -> (B * H, S, K). The mask hides the padding."""
    x = x_BTHK.transpose(1, 2)
    missing = num_keys - x.shape[2]
    return (F.pad(x, (0, 0, 0, missing)) if missing else x).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class Order:
    """The mapping from positions to slots for queries in a draft tree.

    Tree nodes are not stored in the slots of their positions, and each query row has its own order.
    So the values after the stem are gathered for each row. Then the sums equal those for tokens
    that were stored one after another.
    """

    slots_NRS: Tensor
    """The slot of each position, for each row. Entries beyond the row's position are arbitrary."""
    shared: int
    """For all rows, the first `shared` positions are in the slots of the same number."""

    @classmethod
    def of(
        cls, paths_BTP: Tensor, positions_BT: Tensor, num_keys: int, num_kv_heads: int, groups: int
    ) -> Order:
        """Return the mapping for queries at `positions_BT` with `paths_BTP` (`KVCache.paths`)."""
        stems_BT1, after_BTP = paths_BTP[..., :1], paths_BTP[..., 1:]
        places = stems_BT1 + torch.arange(after_BTP.shape[-1], device=paths_BTP.device)
        slots = torch.arange(num_keys, device=paths_BTP.device).expand(*positions_BT.shape, -1)
        on_path = places <= positions_BT[..., None]
        # Padding of shorter paths goes to an extra entry, which is cut off below.
        places = torch.where(on_path, places, num_keys)
        wider = F.pad(slots, (0, 1)).contiguous()
        slots = wider.scatter(-1, places, after_BTP)[..., :num_keys]
        rows = pad_query_rows(slots[:, None].repeat(1, 1, groups, 1))
        B, _, R, S = rows.shape
        rows = rows.expand(B, num_kv_heads, R, S).reshape(B * num_kv_heads, R, S)
        return cls(rows, int(stems_BT1.min()))

    def of_rows(self, start: int, values_NSK: Tensor, size: int) -> Tensor:
        """Return the values (N, R, size, K) at positions `start` to `start + size - 1`."""
        index_NRC = self.slots_NRS[:, :, start : start + size]
        rows = torch.arange(len(values_NSK), device=values_NSK.device)[:, None, None]
        return values_NSK[rows, index_NRC]


def _product(parts_NRC: Tensor, values: Tensor, start: Tensor | None = None) -> Tensor:
    """Return `start` plus weights times values, in fp32: (N, R, K).

    Values are (N, C, K), or (N, R, C, K) if each row has its own.
    """
    if values.ndim == 3:
        if start is None or parts_NRC.dtype != torch.float32:
            product = torch.bmm(parts_NRC, values).float()
            return product if start is None else start + product
        return torch.baddbmm(start, parts_NRC, values)
    N, R, C = parts_NRC.shape
    # Products of exact mode have row counts in multiples of four.
    fours = parts_NRC.reshape(N * R, 1, C).expand(-1, ROW_MULTIPLE, -1).contiguous()
    repeated_start = None
    if start is not None:
        repeated_start = start.reshape(N * R, 1, -1).expand(-1, ROW_MULTIPLE, -1).contiguous()
    return _product(fours, values.flatten(0, 1), repeated_start)[:, 0].view(N, R, -1)


def attend(
    q_NRK: Tensor,
    context: Context,
    mask_NRX: Tensor,
    bounded: bool = False,
    order: Order | None = None,
) -> Tensor:
    """Return softmax(q k^T / sqrt(K) + mask) v, (N, R, K) in the dtype of `q`.

    `bounded` promises that no score exceeds `SCORE_BOUND`. Then the maximum is not subtracted
    before the exponential. With `order`, keys are not in the slots of their positions; the mask
    refers to positions. `R` and `S` must obey the rules of the module docstring. The mask covers
    the last X of the S keys.

    Numerator and denominator are summed in the order of positions, so that keys of weight zero in
    between do not change the result. In fp32 the sums are matrix products, chunk by chunk. In bf16,
    whose products are rounded, the denominator is summed in fp64.
    """
    keys_NKS, values = context
    _, K, S = keys_NKS.shape
    # In place from here on, because allocating tensors of the scores' size dominates the time.
    if q_NRK.dtype == torch.float32:
        scores = torch.bmm(q_NRK * K**-0.5, keys_NKS)
    else:
        scores = torch.bmm(q_NRK, keys_NKS).float().mul_(K**-0.5)
    if order is not None:
        scores = scores.gather(2, order.slots_NRS)
        values = _in_order(values, order)
    X = mask_NRX.shape[-1]
    if X:
        (scores if X == S else scores[:, :, S - X :]).add_(mask_NRX)
    if not bounded:
        scores.sub_(scores.detach().amax(-1, keepdim=True))
    weights = scores.exp_()
    if q_NRK.dtype == torch.float32:
        return _weighted_mean(weights, values)
    mass = weights.sum(-1, keepdim=True, dtype=torch.float64).float()
    parts = torch.split(weights.to(q_NRK.dtype), KEY_CHUNK[q_NRK.dtype], dim=2)
    total = _product(parts[0], values[0])
    for part, value in zip(parts[1:], values[1:], strict=True):
        total = _product(part, value, total)
    return (total / mass).to(q_NRK.dtype)


def _in_order(values: Sequence[Tensor], order: Order) -> list[Tensor]:
    """Return the chunks of values in the order of positions.

    Chunks after the shared positions are gathered for each row: (N, R, C, K).
    """
    chunks, start = list[Tensor](), 0
    all_values = torch.cat(list(values), 1)
    for chunk in values:
        size = chunk.shape[1]
        per_row = start + size > order.shared
        chunks.append(order.of_rows(start, all_values, size) if per_row else chunk)
        start += size
    return chunks


def _weighted_mean(weights_NRS: Tensor, values: Sequence[Tensor]) -> Tensor:
    """Return the mean of the values under unnormalized weights, (N, R, K), all in fp32."""
    N, R, S = weights_NRS.shape
    sizes = [value.shape[-2] for value in values]
    parts = weights_NRS.split_with_sizes(sizes, 2)
    # A product with ones adds in key order. `sum` adds in vector lanes, which trees would permute.
    rows = weights_NRS.view(N * R, S).split_with_sizes(sizes, 1)
    ones = [_ones(size, weights_NRS.device) for size in sizes]
    total = _product(parts[0], values[0])
    mass = torch.mm(rows[0], ones[0])
    for i in range(1, len(sizes)):
        total = _product(parts[i], values[i], total)
        mass = torch.addmm(mass, rows[i], ones[i])
    return total / mass.view(N, R, -1)[:, :, :1]


@cache
@torch.inference_mode(False)
def _ones(rows: int, device: torch.device) -> Tensor:
    return torch.ones(rows, WIDTH_MULTIPLE, device=device)
