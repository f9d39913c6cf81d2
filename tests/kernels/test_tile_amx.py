"""AMX tiles: the order of sums, any number of rows, and rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipstream.kernels.compiling import kernel
from slipstream.kernels.processor import has_amx
from slipstream.kernels.tile_amx import (
    MOST_ROWS,
    configure,
    release,
    round_16_lanes,
    two_panels_amx,
)

pytestmark = pytest.mark.skipif(not has_amx(), reason="no AMX")


@kernel
def run(rows: int, x: int, weights: int, pairs: int, out: int, ahead: int) -> None:
    configure(pairs)
    two_panels_amx(rows, x, 4 * pairs, weights, 64, 64 * pairs, pairs, out, 128, 64, ahead)
    release()


def product(x: Tensor, weight: Tensor, ahead: int = 0) -> Tensor:
    """Return the product of rows and two panels."""
    rows, width = x.shape
    room = torch.zeros(rows + MOST_ROWS, width, dtype=torch.bfloat16)
    room[:rows] = x
    # The contents of rows past the last one do not matter.
    room[rows:] = torch.nan
    panels = weight.view(2, 16, width // 2, 2).transpose(1, 2).contiguous()
    out = torch.empty(rows + MOST_ROWS, 32)
    run(rows, room.data_ptr(), panels.data_ptr(), width // 2, out.data_ptr(), ahead)
    return out[:rows]


def in_order(x: Tensor, weight: Tensor) -> Tensor:
    """Return the product with sums in the documented order; fp64 makes each step exact."""
    total = torch.zeros(len(x), len(weight))
    for block in range(0, x.shape[1], 32):
        halves = []
        for half in range(2):
            part = torch.zeros_like(total)
            for k in range(block + half, min(block + 32, x.shape[1]), 2):
                part = (part.double() + x[:, k, None].double() * weight[:, k].double()).float()
            halves.append(part)
        total += halves[0] + halves[1]
    return total


@pytest.mark.parametrize("width", [2, 16, 30, 32, 34, 96, 112, 256])
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 32, 33, 49])
def test_sums_are_in_the_documented_order(width: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(100 * width + rows)
    x = torch.randn(rows, width, generator=generator).bfloat16()
    weight = torch.randn(32, width, generator=generator).bfloat16()
    expected = in_order(x, weight)
    assert torch.equal(product(x, weight), expected)
    assert torch.equal(product(x, weight, ahead=4096), expected)


def test_subnormal_numbers_count_as_zero() -> None:
    x, weight = torch.ones(3, 32).bfloat16(), torch.zeros(32, 32).bfloat16()
    weight[:, 0] = 2.0**-130
    assert torch.equal(product(x, weight), torch.zeros(3, 32))
    # Normal numbers with a subnormal product.
    weight[:, 0] = 2.0**-100
    assert torch.equal(product(x * 2.0**-40, weight), torch.zeros(3, 32))


def test_rounding_is_to_nearest_even_with_subnormals_as_zero() -> None:
    x = torch.randn(64, generator=torch.Generator().manual_seed(1))
    x[:6] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, torch.inf, torch.nan, 1e-39])
    out = torch.empty(64, dtype=torch.bfloat16)
    round_16_lanes(x.data_ptr(), out.data_ptr(), 64)
    expected = x.bfloat16()
    expected[5] = 0
    assert bool(out[4].isnan())
    assert torch.equal(out.nan_to_num(), expected.nan_to_num())
