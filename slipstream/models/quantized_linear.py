"""Linear layers with quantized weights on a CPU, for drafts. They are not exact.

Weights are integers of 4 or 8 bits with a scale for each group of inputs, and rows are rounded to
int8 (`kernels.product_quantized`). Few rows take as long as reading the weights, and these have
half or a quarter of the bytes of bf16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from slipstream.kernels import product_quantized as kernels
from slipstream.kernels.tile import PANEL
from slipstream.kernels.tile_quantized import GROUP
from slipstream.models.linear import PackedLinear, present
from slipstream.models.numerics import round_up

Bits = Literal[4, 8]


@dataclass(frozen=True, slots=True)
class QuantizedLinear:
    """An approximation of a `PackedLinear` without gradients."""

    panels: Tensor
    """The quantized weight in the kernels' layout, as bytes."""
    start: Tensor
    """Initial values of the kernel's sums: the bias, or zeros."""
    outputs: int
    inputs: int
    bits: Bits

    @classmethod
    def of(cls, linear: PackedLinear, bits: Bits, panels: Tensor | None = None) -> QuantizedLinear:
        """Quantize a layer. `panels` is the memory of an older layer of the same shape to use.

        Raises ValueError unless the kernels compute the layer and its inputs fill whole groups.
        """
        outputs, inputs = linear.weight.shape
        if linear.panels is None or inputs % GROUP:
            raise ValueError(
                f"a weight of shape ({outputs}, {inputs}) cannot be quantized: the compiled "
                f"kernels must compute it, with a multiple of {GROUP} inputs"
            )
        if panels is None:
            panels = torch.empty(quantized_bytes(outputs, inputs, bits), dtype=torch.uint8)
        weight = linear.weight.detach().contiguous()
        kernels.quantize(
            weight.data_ptr(), panels.data_ptr(), outputs, inputs, weight.itemsize, bits
        )
        return cls(panels, present(linear.start), outputs, inputs, bits)

    def product(self, x: Tensor) -> Tensor:
        """Apply the layer to rows in fp32: (M, in) -> (M, `padded`)."""
        x = x.contiguous()
        out = x.new_empty(len(x), self.padded)
        kernels.quantized_product(
            x.data_ptr(),
            self.panels.data_ptr(),
            self.start.data_ptr(),
            out.data_ptr(),
            len(x),
            self.padded,
            self.inputs,
            self.bits,
        )
        return out

    @property
    def padded(self) -> int:
        """The number of outputs rounded up to whole panels."""
        return len(self.start)


def quantized_bytes(outputs: int, inputs: int, bits: int) -> int:
    """Return the bytes of a quantized weight."""
    return kernels.packed_bytes(round_up(outputs, PANEL), inputs, bits)
