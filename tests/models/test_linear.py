"""Linear layers in compute form: rows that do not depend on their company, and gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from slipstream.models.linear import PackedLinear


def weights(outs: int, ins: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(outs)
    return torch.randn(outs, ins, generator=generator) * (1 / math.sqrt(ins))


def test_only_fp32_weights_are_packed_for_kernels() -> None:
    assert PackedLinear.of(weights(16, 16)).panels is not None
    assert PackedLinear.of(weights(16, 16).bfloat16()).panels is None
    assert PackedLinear.of(weights(16, 16).double()).panels is None


@pytest.mark.parametrize(
    ("outs", "ins"), [(1408, 192), (512, 512), (3072, 512), (512, 1536), (101, 48), (7, 5), (1, 1)]
)
def test_a_row_does_not_depend_on_its_company(outs: int, ins: int) -> None:
    linear = PackedLinear.of(weights(outs, ins), weights(1, outs)[0])
    x = torch.randn(1200, ins, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        together = linear(x)
        torch.testing.assert_close(together, F.linear(x, linear.weight, linear.bias))
        threads = torch.get_num_threads()
        try:
            for count in (1, threads):
                torch.set_num_threads(count)
                for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 32, 33, 97, 100, 500):
                    start = 5 * rows % 600
                    assert torch.equal(linear(x[start : start + rows]), together[start:][:rows])
        finally:
            torch.set_num_threads(threads)
    # With gradients it is the same kernel.
    assert torch.equal(linear(x), together)


def test_every_output_is_a_sum_in_the_order_of_the_inputs() -> None:
    weight, x = torch.ones(16, 3), torch.tensor([[1e8, 1.0, -1e8]])
    assert torch.equal(PackedLinear.of(weight)(x), torch.zeros(1, 16))
    assert torch.equal(PackedLinear.of(weight)(x[:, [0, 2, 1]]), torch.ones(1, 16))


def test_weights_that_are_not_finite_are_seen() -> None:
    weight = weights(32, 16)
    weight[3, 4] = math.nan
    weight[20, 5] = math.inf
    out = PackedLinear.of(weight)(torch.ones(5, 16))
    assert bool(out[:, 3].isnan().all())
    assert bool(out[:, 20].isinf().all())
    assert int(out.isfinite().sum()) == 5 * 30


@pytest.mark.parametrize("outs", [1040, 640, 33])
def test_gradients_are_those_of_a_plain_layer(outs: int) -> None:
    x = torch.randn(40, 256, requires_grad=True)
    weight, bias = weights(outs, 256).requires_grad_(), torch.randn(outs, requires_grad=True)
    linear = PackedLinear.of(weight, bias)
    upstream = torch.randn(40, outs)
    inputs = (x, weight, bias)
    ours = torch.autograd.grad((linear(x) * upstream).sum(), inputs)
    theirs = torch.autograd.grad((F.linear(x, weight, bias) * upstream).sum(), inputs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_rows_in_any_number_of_dimensions_and_of_no_other_width() -> None:
    linear = PackedLinear.of(weights(32, 16))
    x = torch.randn(3, 5, 16)
    assert torch.equal(linear(x), linear(x.view(15, 16)).view(3, 5, 32))
    assert linear(x[:0]).shape == (0, 5, 32)
    for wrong in (torch.randn(4, 15), torch.randn(4, 16).double()):
        with pytest.raises(ValueError, match="the weight takes 16 of float32"):
            linear(wrong)
