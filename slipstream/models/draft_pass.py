"""The draft head's forward pass as drafting uses it: fast, and not exact.

Nothing that a draft is changes what is generated, so nothing here obeys exact mode: no padding of
rows and keys, no sums in order. What several steps of one draft share (rotations, masks, where keys
go) is computed once. Training uses `PackedDraftHead.forward`; `tests/models/test_draft_pass.py`
holds the two together. Knows nothing of sampling or requests.

Shapes: N sequences, T columns of new tokens, C columns of a whole draft, H key-value heads, S slots
of the cache, K head width, D hidden width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.models.decoder import rms_norm, rope_tables, rotate
from slipstream.models.draft_head import PackedDraftHead


class DraftPass:
    """One draft of N sequences over cached keys and values of the head."""

    def __init__(
        self,
        head: PackedDraftHead,
        embedding_VD: Tensor,
        kv: Tensor,
        slots_NC: Tensor,
        num_keys: int,
    ) -> None:
        """`kv` (2, rows, H, S, K) is written to, rows 0 .. N-1; `slots_NC` says where the tokens of
        each column go and that they see the slots up to there; `num_keys` is beyond all of them.
        """
        self._head, self._embedding = head, embedding_VD
        config = head.config
        _, rows, heads, slots, width = kv.shape
        n = len(slots_NC)
        positions = slots_NC.clamp(max=config.max_position_embeddings - 1)
        self._cos, self._sin = rope_tables(positions, config, kv.dtype)
        unseen = torch.arange(num_keys, device=kv.device) > slots_NC[:, :, None]
        mask = torch.zeros(unseen.shape, dtype=kv.dtype, device=kv.device)
        mask.masked_fill_(unseen, float("-inf"))
        self._mask_NCS = mask.repeat_interleave(heads, 0) if heads > 1 else mask
        self._lines = kv.view(-1, width)
        first = torch.arange(n * heads, device=kv.device).view(n, 1, heads) * slots
        index = first + slots_NC[:, :, None]
        self._index = torch.stack([index, index + rows * heads * slots])
        matrices = kv.view(2, rows * heads, slots, width)[:, : n * heads, :num_keys]
        self._keys, self._values = matrices[0].transpose(1, 2), matrices[1]

    def run(self, start: int, ids_NT: Tensor, features_NTD: Tensor) -> Tensor:
        """Predicted features (N, T, D) of `ids_NT`, which stand in the columns from `start` on,
        each from the feature before it."""
        w, c, eps = self._head.layer, self._head.config, self._head.eps
        n, T = ids_NT.shape
        b = slice(start, start + T)
        Q, H, K = c.num_heads, c.num_kv_heads, c.head_dim
        embedded = F.embedding(ids_NT, self._embedding)
        x = self._head.fc(torch.cat([embedded, features_NTD], -1).view(n * T, -1))
        normed = x if w.input_norm is None else rms_norm(x, w.input_norm, eps)
        qk, v = w.qkv(normed).view(n, T, Q + 2 * H, K).split_with_sizes([Q + H, H], 2)
        if w.qk_norm is not None:
            qk = rms_norm(qk, w.qk_norm, eps)
        q, k = rotate(qk, self._cos[:, b], self._sin[:, b]).split_with_sizes([Q, H], 2)
        self._lines.index_copy_(0, self._index[:, :, b].flatten(), torch.cat([k, v]).view(-1, K))
        grouped = q.view(n, T, H, Q // H, K).permute(0, 2, 3, 1, 4).reshape(n * H, -1, K)
        mask = self._mask_NCS[:, b]
        if T > 1:
            mask = mask.repeat(1, Q // H, 1)
        scores = torch.baddbmm(mask, grouped, self._keys, alpha=K**-0.5)
        attended = torch.bmm(torch.softmax(scores, -1), self._values)
        rows = attended.view(n, H, Q // H, T, K).permute(0, 3, 1, 2, 4).reshape(n * T, Q * K)
        x = w.out.added_to(x, rows)
        gate, up = w.gate_up(rms_norm(x, w.post_norm, eps))
        return w.down.added_to(x, F.silu(gate) * up).view(n, T, -1)
