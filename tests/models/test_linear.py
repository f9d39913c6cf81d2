"""Linear layers in compute form: rows are independent of their batch; gradients are correct."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from slipstream.kernels.processor import has_amx
from slipstream.models import numerics
from slipstream.models.linear import PackedLinear

DTYPES = [torch.float32, torch.bfloat16]


def weights(outs: int, ins: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(outs)
    return torch.randn(outs, ins, generator=generator) * (1 / math.sqrt(ins))


def test_fp32_and_bf16_weights_are_packed_for_kernels() -> None:
    assert PackedLinear.of(weights(16, 16)).panels is not None
    assert PackedLinear.of(weights(16, 16).bfloat16()).panels is not None
    with pytest.raises(ValueError, match="bf16 weight has 5 inputs"):
        PackedLinear.of(weights(16, 5).bfloat16())
    assert PackedLinear.of(weights(16, 16).double()).panels is None


# With few rows, products compute four panels of 16 outputs at a time. On two threads, (80, 64) and
# (96, 64) leave one and two panels.
SHAPES = [(1408, 192), (512, 512), (3072, 512), (512, 1536), (101, 48), (40, 2), (80, 64), (96, 64)]


@pytest.mark.parametrize(
    ("outs", "ins", "dtype"),
    [(*shape, dtype) for shape in SHAPES for dtype in DTYPES]
    + [(7, 5, torch.float32), (1, 1, torch.float32), (7, 4, torch.bfloat16)],
)
def test_a_row_does_not_depend_on_its_batch(outs: int, ins: int, dtype: torch.dtype) -> None:
    linear = PackedLinear.of(weights(outs, ins).to(dtype), weights(1, outs)[0])
    x = torch.randn(1200, ins, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        together = linear(x)
        torch.testing.assert_close(
            together, F.linear(x.to(dtype).float(), linear.weight.float(), linear.bias)
        )
        threads = torch.get_num_threads()
        try:
            for count in (1, threads):
                torch.set_num_threads(count)
                for rows in (*range(1, 14), 32, 33, 97, 100, 500):
                    start = 5 * rows % 600
                    assert torch.equal(linear(x[start : start + rows]), together[start:][:rows])
        finally:
            torch.set_num_threads(threads)
    # With gradients the same kernel computes the product.
    assert torch.equal(linear(x), together)


@pytest.mark.parametrize("scale", [1e-18, 1e-19, 1e-20, 1e19])
def test_a_row_of_tiny_or_huge_numbers_does_not_depend_on_its_batch(scale: float) -> None:
    # Sums from 1e-36 to 1e-40: fp32 loses precision there, and the bf16 instructions treat such
    # numbers as zero.
    linear = PackedLinear.of((weights(64, 128) * scale).bfloat16())
    x = torch.randn(40, 128, generator=torch.Generator().manual_seed(1)) * scale
    x[7:9, ::3] *= 1e-20
    together = linear(x)
    for rows in (1, 2, 4, 5, 7, 12, 13, 25):
        for start in (0, 6):
            assert torch.equal(linear(x[start : start + rows]), together[start:][:rows])


def test_every_output_is_a_sum_in_the_order_of_the_inputs() -> None:
    weight, x = torch.ones(16, 3), torch.tensor([[1e8, 1.0, -1e8]])
    assert torch.equal(PackedLinear.of(weight)(x), torch.zeros(1, 16))
    assert torch.equal(PackedLinear.of(weight)(x[:, [0, 2, 1]]), torch.ones(1, 16))


def test_bf16_sums_pairs_of_inputs_in_order() -> None:
    # Powers of two are exact in bf16. In fp32 the sum of 2^30 and 1 is 2^30.
    weight, big = torch.ones(32, 4).bfloat16(), 2.0**30
    linear = PackedLinear.of(weight)
    rows = [
        [big, 0, 1, -big],
        [big, 0, -big, 1],
        [big, -big, 1, 0],
        [1, 0, -big, big],
        [1, 1, 1, 1],
    ]
    # The second input of a pair is added first. AMX sums first and second inputs separately.
    totals = torch.tensor([0.0, 1, 0, 0, 4] if has_amx() else [1.0, 0, 1, 0, 4])
    assert torch.equal(linear(torch.tensor(rows)), totals[:, None].expand(5, 32))


def test_rows_are_rounded_to_the_nearest_bf16() -> None:
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(3))
    # Values halfway between two neighbors round to the even one, up and down.
    x[0, :4] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 65535.0])
    x[1, 2] = math.inf
    linear = PackedLinear.of(torch.eye(16).bfloat16())
    assert torch.equal(linear(x).isfinite(), x.isfinite().all(1, keepdim=True).expand(64, 16))
    rows = [0, *range(2, 64)]
    assert torch.equal(linear(x)[rows], x[rows].bfloat16().float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinite_weights_reach_the_output(dtype: torch.dtype) -> None:
    weight = weights(32, 16).to(dtype)
    weight[3, 4] = math.nan
    weight[20, 5] = math.inf
    out = PackedLinear.of(weight)(torch.ones(5, 16))
    assert bool(out[:, 3].isnan().all())
    assert bool(out[:, 20].isinf().all())
    assert int(out.isfinite().sum()) == 5 * 30


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outs", [1040, 640, 33])
def test_gradients_match_a_plain_layer(outs: int, dtype: torch.dtype) -> None:
    x = torch.randn(40, 256, requires_grad=True)
    weight, bias = weights(outs, 256).requires_grad_(), torch.randn(outs, requires_grad=True)
    linear = PackedLinear.of(weight.to(dtype), bias)
    upstream = torch.randn(40, outs)
    inputs = (x, weight, bias)
    ours = torch.autograd.grad((linear(x) * upstream).sum(), inputs)
    theirs = torch.autograd.grad((F.linear(x, weight, bias) * upstream).sum(), inputs)
    # In bf16 the factors of each product and the results are rounded.
    close = 1e-4 if dtype == torch.float32 else 2**-7
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == torch.float32
        assert float((a - b).norm() / b.norm()) < close


@pytest.mark.parametrize("bf16", [True, False])
def test_gradients_are_correct_with_products_in_bf16_and_in_fp32(
    monkeypatch: pytest.MonkeyPatch, bf16: bool
) -> None:
    monkeypatch.setattr("slipstream.models.linear.bf16_products_are_faster", lambda: bf16)
    weight = weights(64, 48).bfloat16().requires_grad_()
    x = torch.randn(200, 48, generator=torch.Generator().manual_seed(1), requires_grad=True)
    grad = torch.randn(200, 64, generator=torch.Generator().manual_seed(2))
    dx, dw = torch.autograd.grad(PackedLinear.of(weight)(x), [x, weight], grad)
    assert (dx.dtype, dw.dtype) == (torch.float32, torch.bfloat16)
    exact_dx = grad.double() @ weight.detach().double()
    exact_dw = grad.T.double() @ x.detach().bfloat16().double()
    # With fp32 products the rows' gradient is exact to fp32. The weight's gradient is always bf16.
    error = float((dx - exact_dx).abs().max())
    assert error < 1e-5 if not bf16 else 1e-4 < error < 0.1
    torch.testing.assert_close(dw.double(), exact_dw, rtol=2**-7, atol=0.1 if bf16 else 2**-7)


@pytest.mark.parametrize(
    ("words", "faster"),
    [
        ("GenuineIntel avx512_bf16", False),
        ("GenuineIntel avx512_bf16 amx_bf16", True),
        ("AuthenticAMD avx512_bf16", True),
        ("Features : asimd bf16", True),
        ("AuthenticAMD avx2", False),
    ],
)
def test_bf16_products_are_used_only_on_processors_with_fast_ones(
    monkeypatch: pytest.MonkeyPatch, words: str, faster: bool
) -> None:
    monkeypatch.setattr(numerics, "cpu_flags", lambda: frozenset(words.split()))
    monkeypatch.setattr(numerics, "is_intel", lambda: "GenuineIntel" in words)
    for asked in (numerics.bf16_products_are_faster, numerics.cpu_has_bf16_units):
        asked.cache_clear()
    try:
        assert numerics.bf16_products_are_faster() is faster
    finally:
        for asked in (numerics.bf16_products_are_faster, numerics.cpu_has_bf16_units):
            asked.cache_clear()


def test_inputs_may_have_any_dimensions_but_only_the_right_width() -> None:
    linear = PackedLinear.of(weights(32, 16))
    x = torch.randn(3, 5, 16)
    assert torch.equal(linear(x), linear(x.view(15, 16)).view(3, 5, 32))
    assert linear(x[:0]).shape == (0, 5, 32)
    for wrong in (torch.randn(4, 15), torch.randn(4, 16).double()):
        with pytest.raises(ValueError, match="needs width 16 and float32"):
            linear(wrong)
