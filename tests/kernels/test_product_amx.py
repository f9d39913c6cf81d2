"""Products by AMX: fused kernels give the bits of separate steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipstream.kernels.compiling import kernel
from slipstream.kernels.processor import has_amx
from slipstream.kernels.product import BF16, pack, product
from slipstream.kernels.product_amx import (
    ROWS_BEYOND,
    bf16_rows_product_part,
    gated_product_part,
)
from slipstream.kernels.rows import gate

pytestmark = pytest.mark.skipif(not has_amx(), reason="no AMX")


@kernel
def in_parts(
    gated: bool, x: int, panels: int, bias: int, out: int, M: int, N: int, K: int, parts: int
) -> None:
    for part in range(parts):
        if gated:
            gated_product_part(x, panels, bias, out, M, N, K, part, parts)
        else:
            bf16_rows_product_part(x, panels, bias, out, M, N, K, part, parts)


def packed(weight: Tensor) -> Tensor:
    outs, ins = weight.shape
    panels = torch.empty(outs * ins, dtype=torch.bfloat16)
    pack(weight.data_ptr(), panels.data_ptr(), outs, ins, BF16)
    return panels


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def plain(x: Tensor, panels: Tensor, bias: Tensor) -> Tensor:
    out = torch.empty(len(x), len(bias))
    a, b, c, d = (t.data_ptr() for t in (x, panels, bias, out))
    product(a, b, c, d, len(x), len(bias), x.shape[1], BF16)
    return out


@pytest.mark.parametrize("rows", [1, 16, 33, 300])
@pytest.mark.parametrize(("width", "ins"), [(16, 48), (48, 64), (256, 32)])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_product_fused_with_the_gate_equals_separate_steps(
    rows: int, width: int, ins: int, parts: int
) -> None:
    x, bias = random(rows, ins), random(2 * width)
    panels = packed(random(2 * width, ins).bfloat16())
    both, expected = plain(x, panels, bias), torch.empty(rows, width)
    gate(both.data_ptr(), expected.data_ptr(), rows, width)
    out = torch.empty(rows, width, dtype=torch.bfloat16)
    addresses = [t.data_ptr() for t in (x, panels, bias, out)]
    in_parts(True, *addresses, rows, width, ins, parts)
    assert torch.equal(out, expected.bfloat16())


@pytest.mark.parametrize("rows", [1, 16, 33, 300])
@pytest.mark.parametrize(("outs", "ins"), [(16, 48), (48, 64), (256, 32)])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_product_of_bf16_rows_equals_that_of_rounded_rows(
    rows: int, outs: int, ins: int, parts: int
) -> None:
    x, bias = random(rows, ins).bfloat16(), random(outs)
    panels = packed(random(outs, ins).bfloat16())
    # Rows past the last one are read, but their contents do not matter.
    padded = torch.full((rows + ROWS_BEYOND, ins), torch.nan, dtype=torch.bfloat16)
    padded[:rows] = x
    out = torch.empty(rows, outs)
    addresses = [t.data_ptr() for t in (padded, panels, bias, out)]
    in_parts(False, *addresses, rows, outs, ins, parts)
    assert torch.equal(out, plain(x.float(), panels, bias))
