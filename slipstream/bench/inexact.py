"""The engine without the rules of exact mode, to see what they cost: the benchmark swaps functions
of the model for others, the engine itself knows nothing of it.

    sdpa       attention by torch's `scaled_dot_product_attention`
    unpadded   also, rows of a decode step and of attention are not filled up to the row multiple

Tokens then depend on the batch. Used by `decode`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.inference.engine import kv_cache, runner
from slipstream.models import attention, decoder
from slipstream.models.attention import Context

KINDS = ("sdpa", "unpadded")


@contextmanager
def inexact(kind: str) -> Iterator[None]:
    """What runs within it, on whichever thread, does without the rules of `KINDS`."""
    swaps: list[tuple[ModuleType, str, object]] = [(decoder, "attend", sdpa)]
    if kind == "unpadded":
        swaps += [(module, "ROW_MULTIPLE", 1) for module in (decoder, kv_cache, runner, attention)]
        swaps.append((runner, "pad_rows", lambda x, multiple: x))
    kept = [(module, name, getattr(module, name)) for module, name, _ in swaps]
    try:
        for module, name, value in swaps:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in kept:
            setattr(module, name, value)


def sdpa(q_NRK: Tensor, context: Context, mask_NRX: Tensor, bounded: bool = False) -> Tensor:
    """`attention.attend` up to rounding."""
    keys_NKS, chunks = context
    N, K, S = keys_NKS.shape
    # The chunks lie one after another in one tensor: no copy.
    values = torch.as_strided(chunks[0], (N, S, K), chunks[0].stride())
    mask = None
    if mask_NRX.shape[-1]:
        mask = F.pad(mask_NRX, (S - mask_NRX.shape[-1], 0)).to(q_NRK.dtype)[None]
    # Four dimensions: with three, torch takes the slow form that materialises the scores.
    keys = keys_NKS.transpose(1, 2)
    return F.scaled_dot_product_attention(q_NRK[None], keys[None], values[None], attn_mask=mask)[0]
