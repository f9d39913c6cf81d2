"""Causal attention by compiled kernels on a CPU. Exact mode's other form is `attention`.

Keys and values are in the dtype that is computed in; in bf16 they lie as the kernels multiply them
(`kernels.attend_bf16`). Every row is computed by itself, over its own keys in the order of
positions, so nothing is padded and nothing depends on the batch. Differentiable where keys and
values are not cached. Shapes as in `attention`; M = B * T rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from slipstream.kernels import attend, attend_bf16
from slipstream.kernels.attend_backward import attend_backward
from slipstream.kernels.tile import PANEL
from slipstream.models.config import ModelConfig
from slipstream.models.functional import rope_table
from slipstream.models.numerics import round_up

SLOT_BLOCK = attend_bf16.BLOCK
"""Slots of a cache come in so many; the first n, n a multiple of this, are the first n K numbers of
a head, whatever the order within."""


@dataclass(frozen=True, slots=True)
class KeyPlaces:
    """Where the keys and values of M rows lie: in elements from the start of a layer's keys, and
    likewise of its values."""

    first_M: Tensor
    """Slot 0 of the row's sequence, first head."""
    own_M: Tensor
    """The slot that the row's own key is written to; -1 where it is not kept."""
    seen_M: Tensor
    """How many slots the row sees, its own among them."""
    head_stride: int
    longest: int
    """The largest of `seen_M`."""
    keys: int
    """Address of the keys of layer 0."""
    values: int
    layer_step: int
    """Bytes from a layer to the next."""
    data: Tensor
    """What the addresses are of: it lives as long as they do."""

    @classmethod
    def of(cls, data: Tensor, rows_M: Tensor, slots_M: Tensor, longest: int) -> KeyPlaces:
        """Rows of `data` (L, 2, N, H, S, K), contiguous: row m has its key in slot `slots_M[m]` of
        row `rows_M[m]` and sees all slots up to there."""
        _, _, rows, heads, slots, width = data.shape
        size = rows * heads * slots * width * data.itemsize
        start = data.data_ptr()
        first = (rows_M * (heads * slots * width)).contiguous()
        return cls(
            first_M=first,
            own_M=first + slots_M * width,
            seen_M=slots_M + 1,
            head_stride=slots * width,
            longest=longest,
            keys=start,
            values=start + size,
            layer_step=2 * size,
            data=data,
        )

    @classmethod
    def alone(cls, kv: Tensor, batch: int, length: int) -> KeyPlaces:
        """Of sequences by themselves, in `own_keys`: every layer writes over it."""
        rows_M = torch.arange(batch).repeat_interleave(length)
        slots_M = torch.arange(length).repeat(batch)
        return replace(cls.of(kv[None], rows_M, slots_M, length), layer_step=0)

    def columns(self, part: slice) -> KeyPlaces:
        """Of places (N, C), those of some columns."""
        return replace(
            self,
            first_M=self.first_M[:, part].contiguous(),
            own_M=self.own_M[:, part].contiguous(),
            seen_M=self.seen_M[:, part].contiguous(),
        )


def own_keys(config: ModelConfig, dtype: torch.dtype, batch: int, length: int) -> Tensor:
    """Room for the keys and values of sequences that stand alone, (2, B, H, S, K) with S slots of
    which the first T = `length` are used."""
    # Zeros: in bf16 weights of zero meet slots beyond the last.
    slots = round_up(length, SLOT_BLOCK) if dtype == torch.bfloat16 else length
    return torch.zeros(2, batch, config.num_kv_heads, slots, config.head_dim, dtype=dtype)


def attends(config: ModelConfig, dtype: torch.dtype) -> bool:
    """Whether `CpuAttention` can compute such heads: in bf16 they fill whole panels."""
    return dtype == torch.float32 or config.head_dim % PANEL == 0


class CpuAttention:
    """`decoder.Attention` of one forward pass."""

    def __init__(
        self,
        config: ModelConfig,
        eps: Tensor,
        positions_BT: Tensor,
        dtype: torch.dtype,
        places: KeyPlaces | None = None,
    ) -> None:
        """Computes in `dtype`. With `places`, keys and values are written and read there; without,
        each sequence stands alone and positions are 0 .. T-1."""
        self._c, self._eps, self._dtype = config, eps, dtype
        self._table = rope_table(config, eps.dtype, positions_BT.device)
        self._positions_M = positions_BT.reshape(-1).contiguous()
        self._cached = places
        self._shape = positions_BT.shape
        self._alone: KeyPlaces | None = None

    def __call__(self, index: int, qkv: Tensor, norms: Tensor | None, bounded: bool) -> Tensor:
        """(M, (Q + 2H) * K) -> (M, Q * K)."""
        places = self._cached
        if places is not None:
            step = index * places.layer_step
            return self._run(qkv, norms, places, places.keys + step, places.values + step, 0)[0]
        if torch.is_grad_enabled():
            attended: Tensor = _Attention.apply(qkv, norms, self)  # type: ignore[no-untyped-call]
            return attended
        return self.over(qkv, norms, self.own_keys(), logs=0)[0]

    def own_keys(self) -> Tensor:
        """Room for this pass's keys and values."""
        return own_keys(self._c, self._dtype, *self._shape)

    def plain(self, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Queries (M, Q * K) and keys and values (2, B, H, T, K) in fp32 from what `over` gives."""
        (B, T), H, K = self._shape, self._c.num_kv_heads, self._c.head_dim
        if self._dtype == torch.float32:
            return q, kv
        S = kv.shape[3]
        keys = kv[0].view(B, H, S // PANEL, K // 2, PANEL, 2).transpose(3, 4)
        values = kv[1].view(B, H, S // 2, K, 2).transpose(3, 4)
        both = torch.stack([keys.reshape(B, H, S, K), values.reshape(B, H, S, K)])
        rows = q.view(H, B * T, -1).transpose(0, 1).reshape(B * T, -1)
        return rows.float(), both[:, :, :, :T].float()

    def over(
        self, qkv: Tensor, norms: Tensor | None, kv: Tensor, logs: int
    ) -> tuple[Tensor, Tensor]:
        """Attention over `own_keys`, which are written; also the queries, as the kernels take them
        (`plain`)."""
        if self._alone is None:
            self._alone = KeyPlaces.alone(kv, *self._shape)
        return self._run(qkv, norms, self._alone, kv[0].data_ptr(), kv[1].data_ptr(), logs)

    def _run(
        self,
        qkv: Tensor,
        norms: Tensor | None,
        places: KeyPlaces,
        keys: int,
        values: int,
        logs: int,
    ) -> tuple[Tensor, Tensor]:
        c = self._c
        M, Q, H, K = qkv.shape[0], c.num_heads, c.num_kv_heads, c.head_dim
        q, out = qkv.new_empty(M, Q * K, dtype=self._dtype), qkv.new_empty(M, Q * K)
        narrow = self._dtype == torch.bfloat16
        place = attend_bf16.place_bf16 if narrow else attend.place
        mix = attend_bf16.attend_bf16 if narrow else attend.attend
        cos, sin = self._table
        q_at, stride = q.data_ptr(), places.head_stride
        place(
            qkv.data_ptr(),
            0 if norms is None else norms.data_ptr(),
            self._eps.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            self._positions_M.data_ptr(),
            q_at,
            keys,
            values,
            places.own_M.data_ptr(),
            stride,
            M,
            Q,
            H,
            K,
        )
        mix(
            q_at,
            keys,
            values,
            places.first_M.data_ptr(),
            places.seen_M.data_ptr(),
            stride,
            places.longest,
            out.data_ptr(),
            logs,
            M,
            Q,
            H,
            K,
        )
        return out, q

    def backward(
        self, qkv: Tensor, norms: Tensor | None, dq: Tensor, dk: Tensor, dqkv: Tensor
    ) -> Tensor | None:
        """Gradients of `qkv`'s queries and keys into `dqkv`, given those of the rotated and scaled
        ones (M, Q, K) and (M, H, K); returns that of `norms`."""
        c = self._c
        Q, H, K = c.num_heads, c.num_kv_heads, c.head_dim
        dnorms = None if norms is None else qkv.new_zeros(torch.get_num_threads(), Q + H, K)
        cos, sin = self._table
        attend.place_backward(
            qkv.data_ptr(),
            0 if norms is None else norms.data_ptr(),
            self._eps.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            self._positions_M.data_ptr(),
            dq.data_ptr(),
            dk.data_ptr(),
            dqkv.data_ptr(),
            0 if dnorms is None else dnorms.data_ptr(),
            qkv.shape[0],
            Q,
            H,
            K,
        )
        return None if dnorms is None else dnorms.sum(0)


class _Attention(torch.autograd.Function):
    """Attention over a pass's own keys."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, norms: Tensor | None, shared: CpuAttention) -> Tensor:
        c = shared._c
        kv = shared.own_keys()
        logs = qkv.new_empty(qkv.shape[0], c.num_heads)
        out, q = shared.over(qkv, norms, kv, logs.data_ptr())
        ctx.save_for_backward(qkv, norms, q, kv, out, logs)
        ctx.shared = shared
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        qkv, norms, q, kv, out, logs = ctx.saved_tensors
        shared: CpuAttention = ctx.shared
        q, kv = shared.plain(q, kv)
        _, B, H, T, K = kv.shape
        Q = q.shape[1] // K
        q, kv, grad = q.contiguous(), kv.contiguous(), grad.contiguous()
        dq, dk, dqkv = torch.empty_like(q), q.new_empty(B * T, H, K), torch.empty_like(qkv)
        attend_backward(
            q.data_ptr(),
            kv[0].data_ptr(),
            kv[1].data_ptr(),
            grad.data_ptr(),
            out.data_ptr(),
            logs.data_ptr(),
            dq.data_ptr(),
            dk.data_ptr(),
            dqkv[:, (Q + H) * K :].data_ptr(),
            dqkv.stride(0) * dqkv.itemsize,
            B,
            T,
            Q,
            H,
            K,
        )
        return dqkv, shared.backward(qkv, norms, dq, dk, dqkv), None
