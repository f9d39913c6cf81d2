"""The engine without the rules of exact mode, to measure their cost.

The benchmark replaces functions of the model; the engine has no such option. Matrix products, norms
and gates are then torch's own operations, without rows of padding, and attention is torch's
`scaled_dot_product_attention`. So tokens can depend on the batch. Used by `decode`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.inference.engine import runner
from slipstream.models import attention, decoder, functional
from slipstream.models import linear as linears
from slipstream.models.attention import Context, Order
from slipstream.models.linear import PackedLinear


@contextmanager
def inexact() -> Iterator[None]:
    """Switches exact mode off in all threads while the context is entered."""
    swaps: list[tuple[object, str, object]] = [
        (attention, "attend", sdpa),
        (PackedLinear, "__call__", _product),
        (runner, "pad_rows", lambda x, multiple: x),
        (decoder, "row_multiple", lambda *_: 1),
    ]
    swaps += [(module, "has_kernels", lambda *_: False) for module in (decoder, functional)]
    kept_as = ("activation_dtype", lambda dtype, device: dtype)
    swaps += [(module, *kept_as) for module in (decoder, linears)]
    swaps += [(module, "ROW_MULTIPLE", 1) for module in (runner, attention)]
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in swaps]
    try:
        for owner, name, value in swaps:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in kept:
            setattr(owner, name, value)


def _product(linear: PackedLinear, x: Tensor) -> Tensor:
    return F.linear(x, linear.weight, linear.bias)


def sdpa(
    q_NRK: Tensor,
    context: Context,
    mask_NRX: Tensor,
    bounded: bool = False,
    order: Order | None = None,
) -> Tensor:
    """As `attention.attend`, up to rounding. Raises ValueError for keys of draft trees."""
    if order is not None:
        raise ValueError("draft trees, whose keys are out of order, are not supported here")
    keys_NKS, chunks = context
    N, K, S = keys_NKS.shape
    # The chunks are adjacent parts of one tensor, so this needs no copy.
    values = torch.as_strided(chunks[0], (N, S, K), chunks[0].stride())
    mask = None
    if mask_NRX.shape[-1]:
        mask = F.pad(mask_NRX, (S - mask_NRX.shape[-1], 0)).to(q_NRK.dtype)[None]
    # Four dimensions: with three, torch uses a slow path that materializes the scores.
    keys = keys_NKS.transpose(1, 2)
    return F.scaled_dot_product_attention(q_NRK[None], keys[None], values[None], attn_mask=mask)[0]
