"""Linear layers over weights in compute form.

On a CPU the weight is packed once and compiled kernels multiply it (`kernels.product`). They are
faster than the libraries that torch calls, for any number of rows (`python bench/linear.py`). Rows
and results are fp32. If the weight is bf16, the kernel rounds the rows to bf16 and sums in fp32. A
row's result does not depend on the number of rows or threads. Elsewhere torch multiplies, and in
exact mode its rows come in multiples of four (`numerics`). Trainer and engine take the same path.
`decoder` uses this module.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from slipstream.kernels import product
from slipstream.kernels.tile import PANEL
from slipstream.models.numerics import (
    activation_dtype,
    bf16_products_are_faster,
    has_kernels,
    round_up,
)


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """The function x W^T + b with `weight` (out, in) in the compute dtype.

    Differentiable in x, weight and bias.
    """

    weight: Tensor
    bias: Tensor | None
    panels: Tensor | None
    """`weight` in the kernels' layout; None if torch multiplies."""
    start: Tensor | None
    """Initial values of the kernel's sums: the bias, or zeros."""

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        """Return the layer; pack `weight` if the kernels support its dtype and device.

        Raises:
            ValueError: the weight is bf16 with an odd number of inputs; the kernels read pairs.
        """
        rows = activation_dtype(weight.dtype, weight.device)
        if not has_kernels(rows, weight.device):
            return cls(weight, bias, None, None)
        outs, ins = weight.shape
        if weight.dtype == torch.bfloat16 and ins % 2:
            raise ValueError(
                f"a bf16 weight has {ins} inputs; the kernels need an even number of inputs"
            )
        rounded = round_up(outs, PANEL)
        source = weight.detach().contiguous()
        panels = source.new_empty(rounded * ins)
        product.pack(source.data_ptr(), panels.data_ptr(), outs, ins, source.itemsize)
        if bias is None:
            return cls(weight, None, panels, _zeros(rounded))
        return cls(weight, bias, panels, F.pad(bias.detach().float(), (0, rounded - outs)))

    def rows(self, indices: Tensor) -> PackedLinear:
        """Return a layer with the outputs `indices` (n,) of this one. It copies their weights."""
        bias = None if self.bias is None else self.bias[indices]
        return PackedLinear.of(self.weight[indices], bias)

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer: (..., in) -> (..., out)."""
        if self.panels is None or self.start is None:
            return F.linear(x, self.weight, self.bias)
        if torch.is_grad_enabled():
            out: Tensor = _Product.apply(x, self.weight, self.bias, self)  # type: ignore[no-untyped-call]
            return out
        return self.product(x)

    def product(self, x: Tensor) -> Tensor:
        """Return the kernel's product, without gradients.

        Raises ValueError for rows of another width or dtype, because the kernel would read past
        their end.
        """
        assert self.panels is not None
        assert self.start is not None
        outs, ins = self.weight.shape
        if x.shape[-1] != ins or x.dtype != torch.float32:
            raise ValueError(
                f"rows have width {x.shape[-1]} and {x.dtype}; the weight needs width {ins} and "
                "float32"
            )
        x = x.contiguous()
        rows, width = x.numel() // ins, len(self.start)
        out = x.new_empty(*x.shape[:-1], width)
        product.product(
            x.data_ptr(),
            self.panels.data_ptr(),
            self.start.data_ptr(),
            out.data_ptr(),
            rows,
            width,
            ins,
            self.panels.itemsize,
        )
        # Operations over the vocabulary need contiguous rows without padding.
        return out if width == outs else out[..., :outs].contiguous()


def present(packed: Tensor | None) -> Tensor:
    """Return `PackedLinear.panels` or `start`, which exist if the kernels compute the layer."""
    assert packed is not None
    return packed


@cache
@torch.inference_mode(False)
def _zeros(count: int) -> Tensor:
    return torch.zeros(count)


class _Product(torch.autograd.Function):
    """The kernel's product; the backward pass uses torch's products."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, linear: PackedLinear
    ) -> Tensor:
        ctx.save_for_backward(x.to(weight.dtype), weight)
        return linear.product(x)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        total = grad.reshape(-1, grad.shape[-1]).sum(0) if need_bias else None
        if bf16_products_are_faster():
            dtype, grad = grad.dtype, grad.to(weight.dtype)
        else:
            dtype, x, weight = grad.dtype, x.to(grad.dtype), weight.to(grad.dtype)
        rows = grad.reshape(-1, grad.shape[-1])
        return (
            (grad @ weight).to(dtype) if need_x else None,
            rows.T @ x.reshape(-1, x.shape[-1]) if need_weight else None,
            total,
            None,
        )
