"""Causal attention by compiled kernels on a CPU. `attention` does the same by torch's operations.

Keys and values have the compute dtype. In bf16 their memory layout is the one that the kernels
multiply (`kernels.attend_bf16`). The kernels compute each row independently, over its own keys in
the order of positions. So no padding is needed and the results do not depend on the batch. The
operations are differentiable if keys and values are not cached.

Shapes as in `attention`; M = B * T rows (queries), L layers, N rows of a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
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
"""The number of slots of a block must be a multiple of this. The first n slots of a block, n a
multiple of it, are the first n * K numbers of a head, in whatever order the layout has them."""


@dataclass(frozen=True, slots=True)
class KeyBlocks:
    """The memory of keys and values of N sequences, in blocks of slots, for the kernels.

    Offsets count elements from the keys of a layer. They hold for its values, too.
    """

    table: Tensor
    """Offset of each block's slot 0 in the first head, (N, E) int64: block i holds the slots from
    i * `block` on. Entries without a block are arbitrary."""
    block: int
    """Slots of a block."""
    head_stride: int
    """Elements from one head to the next."""
    width: int
    """Elements of a slot of a head."""
    keys: int
    """Address of the keys of layer 0."""
    values: int
    """Address of the values of layer 0."""
    layer_step: int
    """Bytes from a layer to the next."""
    data: object
    """The memory at these addresses, held so that it stays valid."""

    @classmethod
    def contiguous(cls, data: Tensor) -> KeyBlocks:
        """Return the locations in a contiguous cache `data` (L, 2, N, H, S, K): a block per row."""
        _, _, rows, heads, slots, width = data.shape
        size = rows * heads * slots * width
        return cls(
            table=torch.arange(0, size, max(heads * slots * width, 1))[:, None],
            block=slots,
            head_stride=slots * width,
            width=width,
            keys=data.data_ptr(),
            values=data.data_ptr() + size * data.itemsize,
            layer_step=2 * size * data.itemsize,
            data=data,
        )

    def places(self, rows_M: Tensor, slots_M: Tensor, longest: int) -> KeyPlaces:
        """Return the locations of M tokens: token m goes to slot `slots_M[m]` of row `rows_M[m]`.

        Each token sees all slots up to its own. `longest` is at least the largest number of slots
        seen.
        """
        # In numpy, because torch takes several times as long for tensors this small.
        row, at, table = rows_M.numpy(), slots_M.numpy(), self.table.numpy()
        own = table[row, at // self.block] + at % self.block * self.width
        return KeyPlaces(
            blocks=self,
            first_M=torch.from_numpy(row * table.shape[1]),
            own_M=torch.from_numpy(own),
            seen_M=torch.from_numpy(at + 1),
            longest=longest,
        )


@dataclass(frozen=True, slots=True)
class KeyPlaces:
    """The memory locations of the keys and values of M rows, for the attention kernels."""

    blocks: KeyBlocks
    first_M: Tensor
    """Index of the first block of the row's sequence in the flat table of `blocks`."""
    own_M: Tensor
    """Offset of the slot for the row's own key; -1 if the key is not stored."""
    seen_M: Tensor
    """Number of slots that the row sees, including its own."""
    longest: int
    """The largest of `seen_M`."""
    paths: Tensor | None = None
    """(..., 1 + P): each row's path through a draft tree, as `kernels.tree_paths` defines it."""

    @property
    def arguments(self) -> tuple[int, int, int, int, int, int, int, int]:
        """The kernels' arguments `first`, `seen`, `table`, `block`, `paths`, `path_step`,
        `head_stride` and `longest`. `paths` and `path_step` are 0 without draft trees."""
        blocks, path, step = self.blocks, 0, 0
        if self.paths is not None:
            path, step = self.paths.data_ptr(), self.paths.shape[-1]
        return (
            self.first_M.data_ptr(),
            self.seen_M.data_ptr(),
            blocks.table.data_ptr(),
            blocks.block,
            path,
            step,
            blocks.head_stride,
            self.longest,
        )

    @classmethod
    def without_cache(cls, kv: Tensor, own: OwnKeys) -> KeyPlaces:
        """Return the locations in `kv`, the buffer of `own`, which every layer overwrites."""
        lengths = torch.tensor(own.lengths)
        width, longest = kv.shape[-1], max(own.lengths)
        slots_M = torch.cat([torch.arange(length) for length in own.lengths])
        # The buffer is a single row of slots. Each sequence is one block of it.
        row = KeyBlocks.contiguous(kv[None, :, None])
        block = round_up(longest, SLOT_BLOCK)
        table = own.slots[:, None] * width
        return cls(
            blocks=replace(row, table=table, block=block, layer_step=0),
            first_M=torch.arange(len(lengths)).repeat_interleave(lengths),
            own_M=(own.slots.repeat_interleave(lengths) + slots_M) * width,
            seen_M=slots_M + 1,
            longest=longest,
        )

    def columns(self, part: slice) -> KeyPlaces:
        """Return the locations of some columns; the rows of these locations are (N, C)."""
        return replace(
            self,
            first_M=self.first_M[:, part].contiguous(),
            own_M=self.own_M[:, part].contiguous(),
            seen_M=self.seen_M[:, part].contiguous(),
            paths=None if self.paths is None else self.paths[:, part].contiguous(),
        )


class OwnKeys:
    """The buffer layout for keys and values of concatenated sequences without a cache."""

    def __init__(self, lengths: Sequence[int], dtype: torch.dtype) -> None:
        self.lengths = list(lengths)
        block = SLOT_BLOCK if dtype == torch.bfloat16 else 1
        ends = list(accumulate(round_up(length, block) for length in lengths))
        self.slots = torch.tensor([0, *ends[:-1]])
        """The first slot of each sequence."""
        self.starts = torch.tensor([0, *accumulate(lengths)])
        """The first row of each sequence, followed by the number of rows."""
        self._slots, self._dtype = ends[-1], dtype

    def buffer(self, config: ModelConfig) -> Tensor:
        """Allocate the buffer for keys and values, (2, H, S, K)."""
        # Zeros, because the bf16 kernels multiply slots past a sequence's end by weights of zero.
        return torch.zeros(2, config.num_kv_heads, self._slots, config.head_dim, dtype=self._dtype)


@dataclass(frozen=True, slots=True)
class ChainKeys:
    """The queries of rows in a later step of draft chains, and the keys of their own chains.

    Each row has a chain that no other row sees. `positions_M` are the rows' positions. Queries
    (M, H, G, K) are rotated and scaled. Keys, which are rotated, and values (C, M, H, K) are of the
    C steps so far, including this one.
    """

    positions_M: Tensor
    q: Tensor
    keys: Tensor
    values: Tensor


def supports_attention(config: ModelConfig, dtype: torch.dtype) -> bool:
    """Return whether `CpuAttention` supports these heads: in bf16 they must fill whole panels."""
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
        lengths: Sequence[int] | None = None,
    ) -> None:
        """Compute in `dtype` for queries at `positions_BT`.

        With `places`, keys and values are written and read there. Without, each sequence attends
        to itself, and its positions start at 0. Sequences have T tokens each, or `lengths` tokens
        if they are concatenated.
        """
        self._c, self._eps, self._dtype = config, eps, dtype
        self._table = rope_table(config, eps.dtype, positions_BT.device)
        self._positions_M = positions_BT.reshape(-1).contiguous()
        self._cached = places
        B, T = positions_BT.shape
        # With a cache, as in a decode step, the buffer layout is not needed.
        self._given = (
            OwnKeys([T] * B if lengths is None else lengths, dtype) if places is None else None
        )
        self._alone: KeyPlaces | None = None

    def __call__(self, index: int, qkv: Tensor, norms: Tensor | None, bounded: bool) -> Tensor:
        """Return the attention output: (M, (Q + 2H) * K) -> (M, Q * K)."""
        places = self._cached
        if places is not None:
            blocks = places.blocks
            step = index * blocks.layer_step
            return self._run(qkv, norms, places, blocks.keys + step, blocks.values + step, 0)[0]
        return self.attend_and_store(qkv, norms, self.own_buffer())

    def attend_and_store(self, qkv: Tensor, norms: Tensor | None, kv: Tensor) -> Tensor:
        """Return the attention output without a cache: (M, (Q + 2H) * K) -> (M, Q * K).

        The call leaves keys and values in `kv`, a buffer from `own_buffer`.
        """
        if torch.is_grad_enabled():
            attended: Tensor = _AttentionFunction.apply(qkv, norms, kv, self)  # type: ignore[no-untyped-call]
            return attended
        return self.attend_over(qkv, norms, kv, logs=0)[0]

    @property
    def _own(self) -> OwnKeys:
        assert self._given is not None, "keys are in a cache"
        return self._given

    def own_buffer(self) -> Tensor:
        """Allocate a buffer for this pass's keys and values."""
        return self._own.buffer(self._c)

    def to_fp32(self, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Convert queries and keys/values from the kernels' layout to fp32.

        Returns queries (M, Q * K), and keys and values (2, H, S, K). The arguments are the queries
        that `attend_over` returns and the `kv` that it writes.
        """
        if self._dtype == torch.float32:
            return q, kv
        _, H, S, K = kv.shape
        keys = kv[0].view(H, S // PANEL, K // 2, PANEL, 2).transpose(2, 3)
        values = kv[1].view(H, S // 2, K, 2).transpose(2, 3)
        both = torch.stack([keys.reshape(H, S, K), values.reshape(H, S, K)])
        rows = q.view(H, q.shape[0], -1).transpose(0, 1).reshape(q.shape[0], -1)
        return rows.float(), both.float()

    def attend_over(
        self, qkv: Tensor, norms: Tensor | None, kv: Tensor, logs: int
    ) -> tuple[Tensor, Tensor]:
        """Write the keys of `qkv` to `kv` and return the attention over them, and the queries.

        The queries are in the kernels' layout (`to_fp32` converts them). `logs` is the address for
        the logarithms of the softmax denominators, or 0.
        """
        if self._alone is None:
            self._alone = KeyPlaces.without_cache(kv, self._own)
        return self._run(qkv, norms, self._alone, kv[0].data_ptr(), kv[1].data_ptr(), logs)

    def _attend_other_queries(
        self, qkv: Tensor, norms: Tensor | None, kv: Tensor, positions_M: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the attention of new queries at `positions_M` over keys from `attend_over`.

        Query m sees the keys that row m saw in `attend_over`. Also returns the logarithms of the
        softmax denominators (M, Q), and the queries in the kernels' layout.
        """
        assert self._alone is not None, "`attend_over` comes first"
        places = replace(self._alone, own_M=torch.full_like(self._alone.own_M, -1))
        logs = qkv.new_empty(len(qkv), self._c.num_heads)
        keys, values = kv[0].data_ptr(), kv[1].data_ptr()
        out, q = self._run(qkv, norms, places, keys, values, logs.data_ptr(), positions_M)
        return out, logs, q

    def attend_with_chains(
        self, qkv: Tensor, norms: Tensor | None, true: Tensor, kv: Tensor, chain: ChainKeys
    ) -> Tensor:
        """Return the attention (M, Q * K) over the keys in `kv` and over each row's own `chain`.

        One softmax covers both. `true` is the `qkv` from which `attend_and_store` computed `kv`.
        """
        if torch.is_grad_enabled():
            attended: Tensor = _Chained.apply(  # type: ignore[no-untyped-call]
                qkv, norms, true, kv, self, chain.positions_M, chain.q, chain.keys, chain.values
            )
            return attended
        return self.chained_forward(qkv, norms, kv, chain)[0]

    def chained_forward(
        self, qkv: Tensor, norms: Tensor | None, kv: Tensor, chain: ChainKeys
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the result of `attend_with_chains`, without gradients.

        Also returns the queries in the kernels' layout, and the logarithms of the softmax
        denominators (M, Q).
        """
        out, logs, q = self._attend_other_queries(qkv, norms, kv, chain.positions_M)
        M, H, G, K = chain.q.shape
        own = (chain.q * chain.keys[..., None, :]).sum(-1)
        # The part over `kv` enters the joint softmax with its whole denominator as weight.
        all_logs = torch.cat([logs.view(1, M, H, G), own])
        mass = torch.logsumexp(all_logs, 0)
        weights = (all_logs - mass).exp()
        mixed = out.view(M, H, G, K) * weights[0, ..., None]
        mixed = mixed + (weights[1:, ..., None] * chain.values[..., None, :]).sum(0)
        return mixed.view(M, -1), q, mass.view(M, -1)

    def _run(
        self,
        qkv: Tensor,
        norms: Tensor | None,
        places: KeyPlaces,
        keys: int,
        values: int,
        logs: int,
        positions_M: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        c = self._c
        M, Q, H, K = qkv.shape[0], c.num_heads, c.num_kv_heads, c.head_dim
        q, out = qkv.new_empty(M, Q * K, dtype=self._dtype), qkv.new_empty(M, Q * K)
        bf16 = self._dtype == torch.bfloat16
        place = attend_bf16.place_bf16 if bf16 else attend.place
        mix = attend_bf16.attend_bf16 if bf16 else attend.attend
        cos, sin = self._table
        q_at, stride = q.data_ptr(), places.blocks.head_stride
        positions_M = self._positions_M if positions_M is None else positions_M
        place(
            qkv.data_ptr(),
            0 if norms is None else norms.data_ptr(),
            self._eps.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            positions_M.data_ptr(),
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
            *places.arguments,
            out.data_ptr(),
            logs,
            M,
            Q,
            H,
            K,
        )
        return out, q

    def backward(
        self,
        qkv: Tensor,
        norms: Tensor | None,
        q: Tensor,
        kv: Tensor,
        grad: Tensor,
        out: Tensor,
        logs: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of `qkv` and `norms` from the gradient of `out`.

        `q` and `kv` are the fp32 tensors from `to_fp32`.
        """
        dqkv = torch.empty_like(qkv)
        dq, dk = self.attention_backward(q, kv, grad, out, logs, dqkv)
        return dqkv, self.place_backward(qkv, norms, dq, dk, dqkv)

    def attention_backward(
        self, q: Tensor, kv: Tensor, grad: Tensor, out: Tensor, logs: Tensor, dqkv: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of the rotated queries (M, Q * K) and keys (M, H, K).

        The gradient of the values goes to its part of `dqkv`. If `out` and `logs` cover more keys
        than `kv` holds, the result is the share of the keys in `kv`.
        """
        c, own = self._c, self._own
        Q, H, K = c.num_heads, c.num_kv_heads, c.head_dim
        dq, dk = torch.empty_like(q), q.new_empty(len(q), H, K)
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
            own.starts.data_ptr(),
            own.slots.data_ptr(),
            len(own.lengths),
            kv.shape[2],
            max(own.lengths),
            Q,
            H,
            K,
            work=Q * K * sum(length * length for length in own.lengths) // 16,
            bf16=self._dtype == torch.bfloat16,
        )
        return dq, dk

    def place_backward(
        self,
        qkv: Tensor,
        norms: Tensor | None,
        dq: Tensor,
        dk: Tensor,
        dqkv: Tensor,
        positions_M: Tensor | None = None,
    ) -> Tensor | None:
        """Write the gradients of the queries and keys before rotation to `dqkv`.

        Returns the gradient of `norms`.
        """
        c = self._c
        Q, H, K = c.num_heads, c.num_kv_heads, c.head_dim
        dnorms = None if norms is None else qkv.new_zeros(torch.get_num_threads(), Q + H, K)
        cos, sin = self._table
        positions_M = self._positions_M if positions_M is None else positions_M
        attend.place_backward(
            qkv.data_ptr(),
            0 if norms is None else norms.data_ptr(),
            self._eps.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            positions_M.data_ptr(),
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


class _AttentionFunction(torch.autograd.Function):
    """Attention over a pass's own keys, with its gradient."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, norms: Tensor | None, kv: Tensor, shared: CpuAttention
    ) -> Tensor:
        c = shared._c
        logs = qkv.new_empty(qkv.shape[0], c.num_heads)
        out, q = shared.attend_over(qkv, norms, kv, logs.data_ptr())
        ctx.save_for_backward(qkv, norms, q, kv, out, logs)
        ctx.shared = shared
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        qkv, norms, q, kv, out, logs = ctx.saved_tensors
        shared: CpuAttention = ctx.shared
        q, kv = shared.to_fp32(q, kv)
        return *shared.backward(qkv, norms, q, kv, grad.contiguous(), out, logs), None, None


class _Chained(torch.autograd.Function):
    """Attention over a pass's keys and over the keys of each row's own chain, with its gradient.

    One softmax covers both parts. The gradient of each part is computed as if it were alone, with
    the denominators and outputs of both (Dao et al. 2022).
    """

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        norms: Tensor | None,
        true: Tensor,
        kv: Tensor,
        shared: CpuAttention,
        positions_M: Tensor,
        chain_q: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        chain = ChainKeys(positions_M, chain_q, keys, values)
        out, q, logs = shared.chained_forward(qkv, norms, kv, chain)
        ctx.save_for_backward(
            qkv, norms, true, q, kv, out, logs, positions_M, chain_q, keys, values
        )
        ctx.shared = shared
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        qkv, norms, true, q, kv, out, logs, positions_M, chain_q, keys, values = ctx.saved_tensors
        shared: CpuAttention = ctx.shared
        q, kv = shared.to_fp32(q, kv)
        grad = grad.contiguous()
        # The queries belong to this pass, the keys and values to the pass that `true` came from.
        dqkv, dtrue = torch.zeros_like(qkv), torch.empty_like(true)
        dq, dk = shared.attention_backward(q, kv, grad, out, logs, dtrue)
        dnorms = shared.place_backward(qkv, norms, dq, torch.zeros_like(dk), dqkv, positions_M)
        of_true = shared.place_backward(true, norms, torch.zeros_like(dq), dk, dtrue)
        if dnorms is not None and of_true is not None:
            dnorms = dnorms + of_true
        M, H, G, K = chain_q.shape
        grads, along = grad.view(M, H, G, K), (grad * out).view(M, H, G, K).sum(-1)
        wide_keys, wide_values = keys[..., None, :], values[..., None, :]
        weights = ((chain_q * wide_keys).sum(-1) - logs.view(M, H, G)).exp()
        dscores = (weights * ((grads * wide_values).sum(-1) - along))[..., None]
        dchain_q = (dscores * wide_keys).sum(0)
        dkeys, dvalues = (dscores * chain_q).sum(-2), (weights[..., None] * grads).sum(-2)
        return dqkv, dnorms, dtrue, None, None, None, dchain_q, dkeys, dvalues
