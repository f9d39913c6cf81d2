"""Causal attention by compiled kernels on a CPU. Exact mode's other form is `attention`.

Keys and values are in the dtype that is computed in; in bf16 they lie as the kernels multiply them
(`kernels.attend_bf16`). Every row is computed by itself, over its own keys in the order of
positions, so nothing is padded and nothing depends on the batch. Differentiable where keys and
values are not cached. Shapes as in `attention`; M = B * T rows.
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
    paths: Tensor | None = None
    """(..., 1 + P): rows' positions on paths through a draft tree; see `kernels.tree_paths`."""

    @property
    def path_arguments(self) -> tuple[int, int]:
        """`paths` and `path_step` of the kernels."""
        paths = self.paths
        return (0, 0) if paths is None else (paths.data_ptr(), paths.shape[-1])

    @classmethod
    def of(cls, data: Tensor, rows_M: Tensor, slots_M: Tensor, longest: int) -> KeyPlaces:
        """Rows of `data` (L, 2, N, H, S, K), contiguous: row m has its key in slot `slots_M[m]` of
        row `rows_M[m]` and sees all slots up to there."""
        _, _, rows, heads, slots, width = data.shape
        size = rows * heads * slots * width * data.itemsize
        start = data.data_ptr()
        # By numpy: what is as small takes torch several times as long, in every step.
        at = slots_M.numpy()
        first = rows_M.numpy() * (heads * slots * width)
        return cls(
            first_M=torch.from_numpy(first),
            own_M=torch.from_numpy(first + at * width),
            seen_M=torch.from_numpy(at + 1),
            head_stride=slots * width,
            longest=longest,
            keys=start,
            values=start + size,
            layer_step=2 * size,
            data=data,
        )

    @classmethod
    def alone(cls, kv: Tensor, own: OwnKeys) -> KeyPlaces:
        """Of sequences by themselves, in the room of `own`: every layer writes over it."""
        begin_M = own.slots.repeat_interleave(torch.tensor(own.lengths))
        slots_M = torch.cat([torch.arange(length) for length in own.lengths])
        # One row of slots, of which each sequence sees its own.
        row = cls.of(
            kv[None, :, None], torch.zeros_like(slots_M), begin_M + slots_M, max(own.lengths)
        )
        return replace(row, first_M=begin_M * kv.shape[-1], seen_M=slots_M + 1, layer_step=0)

    def columns(self, part: slice) -> KeyPlaces:
        """Of places (N, C), those of some columns."""
        return replace(
            self,
            first_M=self.first_M[:, part].contiguous(),
            own_M=self.own_M[:, part].contiguous(),
            seen_M=self.seen_M[:, part].contiguous(),
            paths=None if self.paths is None else self.paths[:, part].contiguous(),
        )


class OwnKeys:
    """Where sequences that stand alone, one after another, have their keys and values."""

    def __init__(self, lengths: Sequence[int], dtype: torch.dtype) -> None:
        self.lengths = list(lengths)
        block = SLOT_BLOCK if dtype == torch.bfloat16 else 1
        ends = list(accumulate(round_up(length, block) for length in lengths))
        self.slots = torch.tensor([0, *ends[:-1]])
        """Of each sequence the first one."""
        self.starts = torch.tensor([0, *accumulate(lengths)])
        """Of each sequence the first row, and then the number of rows."""
        self._slots, self._dtype = ends[-1], dtype

    def room(self, config: ModelConfig) -> Tensor:
        """For keys and values, (2, H, S, K)."""
        # Zeros: in bf16 weights of zero meet slots beyond the last of a sequence.
        return torch.zeros(2, config.num_kv_heads, self._slots, config.head_dim, dtype=self._dtype)


@dataclass(frozen=True, slots=True)
class ChainKeys:
    """What rows of a later draft bring, each for itself: `positions_M` where they stand, queries
    (M, H, G, K), turned and scaled, and turned keys and values (C, M, H, K) of the C drafts so far
    of their chains, their own among them."""

    positions_M: Tensor
    q: Tensor
    keys: Tensor
    values: Tensor


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
        lengths: Sequence[int] | None = None,
    ) -> None:
        """Computes in `dtype`. With `places`, keys and values are written and read there; without,
        each sequence stands alone, positions begin at 0, and where they are not of T tokens each,
        the rows hold one after another of `lengths`."""
        self._c, self._eps, self._dtype = config, eps, dtype
        self._table = rope_table(config, eps.dtype, positions_BT.device)
        self._positions_M = positions_BT.reshape(-1).contiguous()
        self._cached = places
        B, T = positions_BT.shape
        # A decode step has no use for it.
        self._given = (
            OwnKeys([T] * B if lengths is None else lengths, dtype) if places is None else None
        )
        self._alone: KeyPlaces | None = None

    def __call__(self, index: int, qkv: Tensor, norms: Tensor | None, bounded: bool) -> Tensor:
        """(M, (Q + 2H) * K) -> (M, Q * K)."""
        places = self._cached
        if places is not None:
            step = index * places.layer_step
            return self._run(qkv, norms, places, places.keys + step, places.values + step, 0)[0]
        return self.keeping(qkv, norms, self.own_room())

    def keeping(self, qkv: Tensor, norms: Tensor | None, kv: Tensor) -> Tensor:
        """(M, (Q + 2H) * K) -> (M, Q * K) of sequences that stand alone, with their keys and values
        left in `kv`, the `own_room`."""
        if torch.is_grad_enabled():
            attended: Tensor = _AttentionFunction.apply(qkv, norms, kv, self)  # type: ignore[no-untyped-call]
            return attended
        return self.over(qkv, norms, kv, logs=0)[0]

    @property
    def _own(self) -> OwnKeys:
        assert self._given is not None, "keys are in a cache"
        return self._given

    def own_room(self) -> Tensor:
        """For this pass's keys and values."""
        return self._own.room(self._c)

    def plain(self, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Queries (M, Q * K) and keys and values (2, H, S, K) in fp32 from what `over` gives."""
        if self._dtype == torch.float32:
            return q, kv
        _, H, S, K = kv.shape
        keys = kv[0].view(H, S // PANEL, K // 2, PANEL, 2).transpose(2, 3)
        values = kv[1].view(H, S // 2, K, 2).transpose(2, 3)
        both = torch.stack([keys.reshape(H, S, K), values.reshape(H, S, K)])
        rows = q.view(H, q.shape[0], -1).transpose(0, 1).reshape(q.shape[0], -1)
        return rows.float(), both.float()

    def over(
        self, qkv: Tensor, norms: Tensor | None, kv: Tensor, logs: int
    ) -> tuple[Tensor, Tensor]:
        """Attention over the keys in `own_room`, which are written; also the queries, as the
        kernels take them (`plain`)."""
        if self._alone is None:
            self._alone = KeyPlaces.alone(kv, self._own)
        return self._run(qkv, norms, self._alone, kv[0].data_ptr(), kv[1].data_ptr(), logs)

    def _again(
        self, qkv: Tensor, norms: Tensor | None, kv: Tensor, positions_M: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attention of other queries, at `positions_M`, over the keys that `over` wrote, each over
        those that the row in its place saw; the logarithms of its denominators (M, Q); and the
        queries, as the kernels take them."""
        assert self._alone is not None, "`over` comes first"
        places = replace(self._alone, own_M=torch.full_like(self._alone.own_M, -1))
        logs = qkv.new_empty(len(qkv), self._c.num_heads)
        keys, values = kv[0].data_ptr(), kv[1].data_ptr()
        out, q = self._run(qkv, norms, places, keys, values, logs.data_ptr(), positions_M)
        return out, logs, q

    def chained(
        self, qkv: Tensor, norms: Tensor | None, true: Tensor, kv: Tensor, chain: ChainKeys
    ) -> Tensor:
        """`_again` and, together with it, attention over the keys of a row's own `chain`, which no
        other row sees: (M, Q * K). `true` is the `qkv` that `keeping` made `kv` of."""
        if torch.is_grad_enabled():
            attended: Tensor = _Chained.apply(  # type: ignore[no-untyped-call]
                qkv, norms, true, kv, self, chain.positions_M, chain.q, chain.keys, chain.values
            )
            return attended
        return self.with_chain(qkv, norms, kv, chain)[0]

    def with_chain(
        self, qkv: Tensor, norms: Tensor | None, kv: Tensor, chain: ChainKeys
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What `chained` gives; the queries as the kernels take them; and the logarithms of the
        denominators (M, Q)."""
        out, logs, q = self._again(qkv, norms, kv, chain.positions_M)
        M, H, G, K = chain.q.shape
        own = (chain.q * chain.keys[..., None, :]).sum(-1)
        # The slots in `kv` weigh as much as all of their exponentials.
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
        narrow = self._dtype == torch.bfloat16
        place = attend_bf16.place_bf16 if narrow else attend.place
        mix = attend_bf16.attend_bf16 if narrow else attend.attend
        cos, sin = self._table
        q_at, stride = q.data_ptr(), places.head_stride
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
            places.first_M.data_ptr(),
            places.seen_M.data_ptr(),
            *places.path_arguments,
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
        self,
        qkv: Tensor,
        norms: Tensor | None,
        q: Tensor,
        kv: Tensor,
        grad: Tensor,
        out: Tensor,
        logs: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Gradients of `qkv` and `norms` from that of `out`; `q` and `kv` are `plain`."""
        dqkv = torch.empty_like(qkv)
        dq, dk = self.attention_backward(q, kv, grad, out, logs, dqkv)
        return dqkv, self.place_backward(qkv, norms, dq, dk, dqkv)

    def attention_backward(
        self, q: Tensor, kv: Tensor, grad: Tensor, out: Tensor, logs: Tensor, dqkv: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gradients of the turned queries (M, Q * K) and keys (M, H, K); that of the values goes to
        its place in `dqkv`. Where `out` and `logs` are of more keys than those in `kv`, it is the
        part of these."""
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
            narrow=self._dtype == torch.bfloat16,
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
        """To `dqkv`, the gradients of queries and keys before they were turned; that of `norms` is
        returned."""
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
    """Attention over a pass's own keys."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, norms: Tensor | None, kv: Tensor, shared: CpuAttention
    ) -> Tensor:
        c = shared._c
        logs = qkv.new_empty(qkv.shape[0], c.num_heads)
        out, q = shared.over(qkv, norms, kv, logs.data_ptr())
        ctx.save_for_backward(qkv, norms, q, kv, out, logs)
        ctx.shared = shared
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        qkv, norms, q, kv, out, logs = ctx.saved_tensors
        shared: CpuAttention = ctx.shared
        q, kv = shared.plain(q, kv)
        return *shared.backward(qkv, norms, q, kv, grad.contiguous(), out, logs), None, None


class _Chained(torch.autograd.Function):
    """Attention over a pass's keys and over those of a row's own chain.

    A softmax over both: what it gives back to either is what each would get by itself, with the
    sums and results of both (Dao et al. 2022).
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
        out, q, logs = shared.with_chain(qkv, norms, kv, chain)
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
        q, kv = shared.plain(q, kv)
        grad = grad.contiguous()
        # Queries are those of this pass, keys and values those of the one before.
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
