"""Linear layers over weights that are laid out for the product once.

A library product of few rows spends most of its time rearranging the weights. On x86 CPUs, large
fp32 weights are therefore kept in oneDNN's blocked layout (`python bench/linear.py`). Its rows do
not depend on how many are computed at once, nor on the thread count, so it obeys exact mode
(`tests/models/test_linear.py`). Trainer and engine decide by the weights alone and so use the same
kernel. Called by `decoder`.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

PREPARED_FROM = 1 << 18
"""Elements from which on a weight is laid out: below, the extra call costs more than it saves."""


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """x W^T + b, for `weight` (out, in) in the compute dtype. Differentiable in all three."""

    weight: Tensor
    bias: Tensor | None
    prepared: Tensor | None
    """`weight` in oneDNN's layout, opaque to everything but its product."""
    transposed: Tensor
    """A view of `weight`, made once."""

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        """Lay out `weight` where that pays."""
        prepared = None
        if worth_preparing(weight):
            prepared = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
        return cls(weight, bias, prepared, weight.t())

    def __call__(self, x: Tensor) -> Tensor:
        """(M, in) -> (M, out)."""
        if self.prepared is not None:
            return _prepared_product(x, self.weight, self.bias, self.prepared)
        if self.bias is not None:
            return torch.addmm(self.bias, x, self.transposed)
        return torch.mm(x, self.transposed)

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """`residual` (M, out) + x W^T."""
        # Not in bf16: one rounding in place of two would be another model than transformers'.
        if self.prepared is None and self.bias is None and self.weight.dtype == torch.float32:
            return torch.addmm(residual, x, self.transposed)
        return residual + self(x)


@dataclass(frozen=True, slots=True)
class PackedPair:
    """Two products of the same rows with weights of one shape, without bias."""

    joined: PackedLinear
    """Both as one product, (2 * out, in)."""
    halves: Tensor
    """Its weight as (2, in, out)."""

    @classmethod
    def of(cls, first: Tensor, second: Tensor) -> PackedPair:
        """Lay out both, (out, in) each, where that pays."""
        joined = PackedLinear.of(torch.cat([first, second]))
        return cls(joined, joined.weight.view(2, *first.shape).transpose(1, 2))

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(M, in) -> two of (M, out)."""
        if self.joined.prepared is None:
            # A batch of two occupies two threads; the library hardly shares out one small product.
            first, second = torch.bmm(x.expand(2, -1, -1), self.halves).unbind()
        else:
            first, second = self.joined(x).chunk(2, dim=-1)
        return first, second


def worth_preparing(weight: Tensor) -> bool:
    """Whether the blocked layout is known to be exact and faster for `weight`."""
    return (
        weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and weight.numel() >= PREPARED_FROM
        and platform.machine() in ("x86_64", "AMD64")
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    )


def _prepared_product(x: Tensor, weight: Tensor, bias: Tensor | None, prepared: Tensor) -> Tensor:
    if torch.is_grad_enabled():
        out: Tensor = _Prepared.apply(x, weight, bias, prepared)  # type: ignore[no-untyped-call]
        return out
    return _product(x, prepared, bias)


def _product(x: Tensor, prepared: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, prepared, bias, "none", [], "")
    return out


class _Prepared(torch.autograd.Function):
    """The product forwards; backwards the same formulas as a plain linear layer."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, prepared: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, prepared, bias)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        rows = grad.reshape(-1, grad.shape[-1])
        return (
            grad @ weight if need_x else None,
            rows.T @ x.reshape(-1, x.shape[-1]) if need_weight else None,
            rows.sum(0) if need_bias else None,
            None,
        )
