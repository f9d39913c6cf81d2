"""Products with quantized weights, compared with the same arithmetic in torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from numba import njit, types
from numba.extending import intrinsic
from torch import Tensor

from slipstream.kernels import product_quantized as kernels
from slipstream.kernels import tile_quantized
from slipstream.kernels.avx512 import WHOLE
from slipstream.kernels.tile_quantized import GROUP

SHAPES = [(16, 32), (48, 64), (64, 96), (208, 160)]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rounded_weight(weight: Tensor, bits: int) -> Tensor:
    """The weight that is stored: in each group the largest number becomes the integer 0."""
    N, K = weight.shape
    groups = weight.double().view(N, K // GROUP, GROUP)
    middle = 2 ** (bits - 1)
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    scale = (-largest / middle).to(torch.bfloat16).double()
    integers = (groups / torch.where(scale == 0, 1.0, scale)).round() + middle
    stored: Tensor = (integers.clamp(0, 2 * middle - 1) - middle) * scale
    return stored.view(N, K)


def rounded_rows(x: Tensor) -> Tensor:
    """Rows in int8, with one scale for each group."""
    groups = x.double().view(len(x), -1, GROUP)
    scale = groups.abs().amax(-1, keepdim=True) / 127
    return ((groups / torch.where(scale == 0, 1.0, scale)).round() * scale).view(x.shape)


def product(x: Tensor, weight: Tensor, bits: int, start: Tensor) -> Tensor:
    N, K = weight.shape
    # The bytes after the packed weight must stay as they are.
    size = kernels.packed_bytes(N, K, bits)
    packed = torch.full((size + 64,), 7, dtype=torch.uint8)
    kernels.quantize(weight.data_ptr(), packed.data_ptr(), N, K, weight.itemsize, bits)
    assert bool((packed[size:] == 7).all())
    out = torch.full((len(x) + 1, N), 7.0)
    kernels.quantized_product(
        x.data_ptr(), packed.data_ptr(), start.data_ptr(), out.data_ptr(), len(x), N, K, bits
    )
    assert bool((out[-1] == 7).all())
    return out[:-1]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 9])
def test_products_match_rounded_factors(
    shape: tuple[int, int], bits: int, dtype: torch.dtype, rows: int
) -> None:
    weight = draw(*shape, seed=shape[0]).to(dtype)
    weight[3, :GROUP] = 0
    x, start = draw(rows, shape[1], seed=rows), draw(shape[0], seed=2)
    x[0, : GROUP // 2] = 0
    if rows > 1:
        x[1, :GROUP] = 0
    found = product(x, weight, bits, start)
    expected = rounded_rows(x) @ rounded_weight(weight, bits).T + start
    # A number in the middle between two integers may be rounded either way. In bf16 many are.
    close = torch.isclose(found.double(), expected, rtol=1e-4, atol=1e-4)
    assert close.double().mean() > (0.98 if dtype == torch.float32 else 0.9)
    torch.testing.assert_close(
        found.double(), expected, rtol=0.02, atol=0.02 if dtype == torch.float32 else 1.0
    )
    exact = x.double() @ weight.double().T + start
    error = float((found - exact).norm() / (exact - start).norm())
    assert error < (0.12 if bits == 4 else 0.01)


def test_a_row_does_not_depend_on_the_number_of_rows() -> None:
    weight, x, start = draw(96, 64), draw(7, 64, seed=1), torch.zeros(96)
    many = product(x, weight, 8, start)
    for row in range(7):
        assert torch.equal(product(x[row : row + 1].clone(), weight, 8, start)[0], many[row])


@pytest.mark.parametrize("in_hardware", [False, True])
def test_four_products_are_added_in_each_lane(
    in_hardware: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain instructions, for other CPUs, give the same integers as the special one."""
    if in_hardware and not tile_quantized._IN_HARDWARE:
        pytest.skip("no AVX512_VNNI")
    monkeypatch.setattr(tile_quantized, "_IN_HARDWARE", in_hardware)

    def add(typingctx: Any, total: Any, weights: Any, row: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            places = [builder.inttoptr(address, WHOLE.as_pointer()) for address in args]
            loaded = [builder.load(place, align=4) for place in places]
            builder.store(tile_quantized._add_products(builder, *loaded), places[0], align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 3), generate

    emit = intrinsic(add)

    def run(total: int, weights: int, row: int) -> None:
        emit(total, weights, row)

    generator = torch.Generator().manual_seed(4)
    total = torch.randint(-1000, 1000, (16,), generator=generator, dtype=torch.int32)
    weights = torch.randint(0, 256, (16, 4), generator=generator, dtype=torch.uint8)
    row = torch.randint(-128, 128, (16, 4), generator=generator, dtype=torch.int8)
    weights[0], row[0] = 255, -128
    expected = total + (weights.int() * row.int()).sum(1).int()
    njit(run)(total.data_ptr(), weights.data_ptr(), row.data_ptr())
    assert torch.equal(total, expected)
