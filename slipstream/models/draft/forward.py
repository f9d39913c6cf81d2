"""The draft head's forward pass for drafting: fast, but not in exact mode.

Drafts do not change the generated tokens. So this pass needs no exact mode: rows and keys are not
padded, and sums may run in any order. Values that several steps of one draft share (rotations,
masks, cache slots) are computed once. Training uses `PackedDraft.unroll`;
`tests/models/draft/test_forward.py` checks that both agree. This module knows nothing of sampling
or requests.

Shapes: N sequences, T columns of new tokens, C columns of a whole draft, F nodes of a tree level
for each sequence, H key-value heads, S slots of the cache, K head width, D hidden width.
"""

from __future__ import annotations

from math import inf

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.kernels.draft.prefill import most_rows
from slipstream.kernels.draft.tree import WIDTH, tree, tree_numbers
from slipstream.models.cpu_attention import KeyBlocks, KeyPlaces
from slipstream.models.decoder import PackedDecoder
from slipstream.models.draft.model import PackedDraft
from slipstream.models.functional import rms_norm, rope_at, rope_table, rotate
from slipstream.models.linear import present
from slipstream.tree_size import candidate_count

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class TreeDrafter:
    """Draft trees in one kernel call on a CPU, for a draft head and its policy.

    Both must have the same dtype, and the kernels must support the head (`PackedDraft.fused`).
    The constructor collects the addresses of the weights, because this takes as long as drafting a
    level with a small head.
    """

    def __init__(self, head: PackedDraft, policy: PackedDecoder) -> None:
        # Kept alive, because the kernel gets only addresses.
        self.head, self.policy = head, policy
        fused = head.fused
        assert fused is not None
        self._fused = fused
        c, fc = head.config, head.fc
        lm_head = head.draft_lm_head(policy.lm_head)
        norm, last_norm = head.state_norms
        draft_tokens, like = head.tokens, policy.embedding
        cos, sin = rope_table(c, like.dtype, like.device)
        self._held = lm_head, norm, last_norm, draft_tokens, cos, sin
        self._padded = len(present(lm_head.start))
        self._widths = c.hidden_size, fc.weight.shape[1]
        self._is_eagle3 = norm is not None
        self._models = (
            like.data_ptr(),
            present(fc.panels).data_ptr(),
            present(fc.start).data_ptr(),
            present(lm_head.panels).data_ptr(),
            present(lm_head.start).data_ptr(),
            self._padded,
            0 if norm is None else norm.data_ptr(),
            0 if last_norm is None else last_norm.data_ptr(),
            0 if draft_tokens is None else draft_tokens.data_ptr(),
            len(lm_head.weight),
        )
        self._layer = fused.table, head.eps.data_ptr()
        self._rotation = cos.data_ptr(), sin.data_ptr(), c.max_position_embeddings - 1
        heads = c.num_heads, c.num_kv_heads, c.head_dim
        self._shape = *self._widths, *heads, c.intermediate_size, fused.dtype.itemsize

    def __call__(
        self,
        kv: KeyBlocks,
        cached_N: Ints,
        counts_N: Ints,
        ids_T: Ints,
        features_T: Ints,
        keys_N2: Tensor,
        positions_N: Tensor,
        temperatures_N: Tensor,
        steps: int,
        topk: int,
        least: float = -inf,
        scale: float = 1.0,
    ) -> tuple[Ints, Ints, Floats, Floats]:
        """Prefill the head, then draft a tree of `steps` levels for each sequence.

        Returns the candidates' tokens, parents and scores, (N, C) each, and the score gaps of the
        first level (N, W), as `kernels.draft.tree` defines them. With `topk` 1 the tree is a chain.

        `kv` is the head's KV cache in the models' dtype, with a row for each sequence. The prefill
        covers the new tokens `ids`, sequence by sequence, `counts` (at least 1) of each. `features`
        are the addresses of the feature rows before them, which the caller keeps alive. The new
        tokens go to the slots after the `cached` ones. `positions` are the positions of the first
        draft tokens. The candidates with the best scores, of at least `least`, are followed in the
        next level; a level takes `topk` slots. `scale` is the scale of the scores in
        `kernels.draft.tree`.
        """
        n = len(counts_N)
        shape = n, candidate_count(steps, topk)
        tokens, parents = np.empty((2, *shape), np.int64)
        scores, gaps = np.empty(shape), np.empty((n, WIDTH))
        limits = np.array([least, scale])
        inputs = np.concatenate([counts_N, cached_N, ids_T, features_T])
        early = len(ids_T) - n
        D, F = self._widths
        rows, most = n * topk, most_rows(n * topk, early)
        # Buffers for logits, true features, inputs of products, and inputs of the layer. The last
        # buffer, for the layer's output, follows them.
        sizes = rows * self._padded, most * F if self._is_eagle3 else 0, most * 2 * D, most * D
        like = self.policy.embedding
        memory = like.new_empty(sum(sizes) + rows * D)
        buffers = [memory.data_ptr()]
        for size in sizes:
            buffers.append(buffers[-1] + 4 * size)
        *before, normed = buffers
        positions_N = positions_N.contiguous()
        spots = np.empty(tree_numbers(n, early, steps, topk), np.int64)
        layer_memory, (spare, delta, *others) = self._fused.buffers(like, most)
        tree(
            inputs.ctypes.data,
            positions_N.data_ptr(),
            spots.ctypes.data,
            early,
            *self._models,
            keys_N2.data_ptr(),
            temperatures_N.data_ptr(),
            tokens.ctypes.data,
            parents.ctypes.data,
            scores.ctypes.data,
            steps,
            topk,
            limits.ctypes.data,
            gaps.ctypes.data,
            *self._layer,
            *before,
            spare,
            delta,
            normed,
            *others,
            *self._rotation,
            kv.table.data_ptr(),
            kv.table.shape[1],
            kv.block,
            kv.head_stride,
            int((cached_N + counts_N).max()) + (steps - 1) * topk,
            kv.keys,
            kv.values,
            n,
            *self._shape,
            work=self._fused.size,
        )
        del memory, layer_memory, spots, limits  # The kernel used them until here.
        return tokens, parents, scores, gaps


class DraftPass:
    """The forward passes of one draft of N sequences, over the head's KV cache."""

    def __init__(
        self,
        head: PackedDraft,
        embedding_VD: Tensor,
        kv: Tensor | KeyBlocks,
        slots_NC: Tensor,
        num_keys: int,
    ) -> None:
        """`kv` is the head's cache; the pass writes to its rows 0 .. N-1. If the head has kernels,
        it is a `KeyBlocks`, else a tensor (2, rows, H, S, K).

        `slots_NC` are the slots of the tokens in each column. A token sees the slots up to its own.
        `num_keys` must be greater than all of them.
        """
        self._head, self._embedding = head, embedding_VD
        positions = slots_NC.clamp(max=head.config.max_position_embeddings - 1)
        self._positions = positions
        self._places: KeyPlaces | None = None
        self._columns: _Columns | None = None
        self._mask_NCS: Tensor | None = None
        if isinstance(kv, KeyBlocks):
            assert head.fused is not None, "torch's operations need a tensor"
            rows = torch.arange(len(slots_NC))[:, None].expand_as(slots_NC)
            self._places = kv.places(rows, slots_NC, num_keys)
        else:
            assert head.fused is None, "the kernels need a `KeyBlocks`"
            unseen = torch.arange(num_keys, device=kv.device) > slots_NC[:, :, None]
            self._columns = _Columns(head, kv, slots_NC, positions, num_keys)
            mask_NCS, heads = _additive(unseen, kv.dtype), head.config.num_kv_heads
            # One mask for each key-value head of each sequence.
            self._mask_NCS = mask_NCS.repeat_interleave(heads, 0) if heads > 1 else mask_NCS

    def run(self, start: int, ids_NT: Tensor, states_NTD: Tensor) -> Tensor:
        """Return the next states (N, T, D) of `ids_NT`, each from the state before it.

        The tokens are in the columns from `start` on.
        """
        head = self._head
        n, T = ids_NT.shape
        columns = slice(start, start + T)
        if self._places is not None and head.fused is not None:
            x, qkv_input = head.layer_inputs(ids_NT, states_NTD, self._embedding)
            places = self._places.columns(columns)
            # Copied, because the call overwrites x, which can be the states themselves.
            x = x if qkv_input is None else x.clone()
            out, _ = head.fused(x, self._positions[:, columns], places, qkv_input_ME=qkv_input)
        else:
            assert self._columns is not None
            assert self._mask_NCS is not None
            mask = self._mask_NCS[:, columns]
            if T > 1:
                mask = mask.repeat(1, head.config.group_size, 1)
            attention = _ColumnAttention(self._columns, columns, columns, mask)
            out = head.step(ids_NT, states_NTD, self._embedding, attention)
        return out.view(n, T, -1)


class LevelPass:
    """The forward passes of draft trees, one for each level, by torch's operations.

    Values that the levels share are computed once, because on a GPU starting an operation takes
    longer than the operation itself. A level has F tokens of each sequence; there are A levels.
    """

    def __init__(
        self,
        head: PackedDraft,
        embedding_VD: Tensor,
        kv: Tensor,
        ends_N: Tensor,
        num_keys: int,
        levels: int,
        topk: int,
    ) -> None:
        """`kv` is as in `DraftPass`. `ends_N` are the numbers of filled slots, which all nodes see.

        Each level adds `topk` slots after them. `num_keys` must be greater than all slots.
        """
        self._head, self._embedding, self._topk = head, embedding_VD, topk
        device = kv.device
        first_N1 = ends_N[:, None]
        self._slots_NC = first_N1 + torch.arange(levels * topk, device=device)
        positions_NA = first_N1 + torch.arange(levels, device=device)
        positions_NA = positions_NA.clamp(max=head.config.max_position_embeddings - 1)
        unseen_N1S = torch.arange(num_keys, device=device) >= first_N1[:, :, None]
        self._columns = _Columns(head, kv, self._slots_NC, positions_NA, num_keys)
        self._mask_NFS = _additive(unseen_N1S, kv.dtype)

    def run(self, level: int, ids_NF: Tensor, states_NFD: Tensor, parents_NF: Tensor) -> Tensor:
        """Return the next states (N, F, D) of `ids_NF` at `level`, each from the state before it.

        A node sees itself and what its parent sees. `parents_NF` are the parents' indices in the
        level before.
        """
        n, T = ids_NF.shape
        columns = slice(level * self._topk, level * self._topk + T)
        if level:
            mask_NFS = of_parents(self._mask_NFS, parents_NF)
        else:
            mask_NFS = self._mask_NFS.repeat(1, T, 1)
        self._mask_NFS = mask_NFS.scatter_(2, self._slots_NC[:, columns, None], 0.0)
        c, S = self._head.config, mask_NFS.shape[-1]
        of_all = mask_NFS[:, None, None].expand(-1, c.num_kv_heads, c.group_size, -1, -1)
        mask = of_all.reshape(n * c.num_kv_heads, -1, S)
        attention = _ColumnAttention(self._columns, columns, slice(level, level + 1), mask)
        out = self._head.step(ids_NF, states_NFD, self._embedding, attention)
        return out.view(n, T, -1)


def of_parents(x_NFX: Tensor, parents_NG: Tensor) -> Tensor:
    """Return the parents' entries of `x` for G nodes of the next level: (N, F, X) -> (N, G, X)."""
    return x_NFX.gather(1, parents_NG[..., None].expand(-1, -1, x_NFX.shape[-1]))


def _additive(unseen: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(unseen.shape, dtype=dtype, device=unseen.device)
    return mask.masked_fill_(unseen, float("-inf"))


class _Columns:
    """Values that all columns of a draft share if torch's operations compute them."""

    def __init__(
        self,
        head: PackedDraft,
        kv: Tensor,
        slots_NC: Tensor,
        positions_NC: Tensor,
        num_keys: int,
    ) -> None:
        _, rows, heads, slots, width = kv.shape
        n = len(slots_NC)
        self.config, self.eps = head.config, head.eps
        self.cos, self.sin = rope_at(positions_NC, head.config, kv.dtype)
        self.lines = kv.view(-1, width)
        first = torch.arange(n * heads, device=kv.device).view(n, 1, heads) * slots
        index = first + slots_NC[:, :, None]
        self.index = torch.stack([index, index + rows * heads * slots])
        matrices = kv.view(2, rows * heads, slots, width)[:, : n * heads, :num_keys]
        self.keys, self.values = matrices[0].transpose(1, 2), matrices[1]


class _ColumnAttention:
    """The attention of some columns by torch's operations."""

    def __init__(self, shared: _Columns, columns: slice, positions: slice, mask: Tensor) -> None:
        """`positions` selects entries of the shared rotations.

        `mask` is (N * H, 1, S), or (N * H, G * T, S) with the T columns of each query head of a
        group one head after the other.
        """
        self._shared, self._columns, self._positions = shared, columns, positions
        self._mask = mask

    def __call__(self, index: int, qkv: Tensor, norms: Tensor | None, bounded: bool) -> Tensor:
        s, b = self._shared, self._columns
        Q, H, K = s.config.num_heads, s.config.num_kv_heads, s.config.head_dim
        cos, sin = s.cos[:, self._positions], s.sin[:, self._positions]
        n, T = len(cos), b.stop - b.start
        qk, v = qkv.view(n, T, Q + 2 * H, K).split_with_sizes([Q + H, H], 2)
        if norms is not None:
            qk = rms_norm(qk, norms, s.eps)
        q, k = rotate(qk, cos, sin).split_with_sizes([Q, H], 2)
        s.lines.index_copy_(0, s.index[:, :, b].flatten(), torch.cat([k, v]).view(-1, K))
        grouped = q.view(n, T, H, Q // H, K).permute(0, 2, 3, 1, 4).reshape(n * H, -1, K)
        scores = torch.baddbmm(self._mask, grouped, s.keys, alpha=K**-0.5)
        attended = torch.bmm(torch.softmax(scores, -1), s.values)
        return attended.view(n, H, Q // H, T, K).permute(0, 3, 1, 2, 4).reshape(n * T, Q * K)
