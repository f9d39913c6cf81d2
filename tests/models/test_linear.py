"""Prepared linear layers: the rows of exact mode, and gradients of a plain layer."""

from __future__ import annotations

import math
import platform

import pytest
import torch
from torch.nn import functional as F

from slipstream.models.linear import PREPARED_FROM, PackedLinear, PackedPair, worth_preparing
from slipstream.models.numerics import ROW_MULTIPLE

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="prepared on x86 only"
)


def weights(outs: int, ins: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(outs)
    return torch.randn(outs, ins, generator=generator) * (1 / math.sqrt(ins))


def test_only_large_fp32_weights_on_cpu_are_prepared() -> None:
    assert worth_preparing(weights(512, PREPARED_FROM // 512))
    assert not worth_preparing(weights(511, PREPARED_FROM // 512))
    assert not worth_preparing(weights(1024, 512).bfloat16())
    assert PackedLinear.of(weights(16, 16)).prepared is None


@pytest.mark.parametrize(("outs", "ins"), [(1408, 192), (512, 512), (3072, 512), (512, 1536)])
def test_a_row_does_not_depend_on_its_company(outs: int, ins: int) -> None:
    linear = PackedLinear.of(weights(outs, ins), weights(1, outs)[0])
    assert linear.prepared is not None
    x = torch.randn(1200, ins, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        together = linear(x)
        torch.testing.assert_close(together, F.linear(x, linear.weight, linear.bias))
        threads = torch.get_num_threads()
        try:
            for count in (1, threads):
                torch.set_num_threads(count)
                for rows in (1, 2, 3, 4, 7, 12, 32, 33, 100, 500):
                    start = 5 * rows % 600
                    assert torch.equal(linear(x[start : start + rows]), together[start:][:rows])
        finally:
            torch.set_num_threads(threads)
    # With gradients it is the same kernel.
    assert torch.equal(linear(x), together)


@pytest.mark.parametrize("outs", [1040, 640])
def test_gradients_are_those_of_a_plain_layer(outs: int) -> None:
    x = torch.randn(40, 256, requires_grad=True)
    weight, bias = weights(outs, 256).requires_grad_(), torch.randn(outs, requires_grad=True)
    linear = PackedLinear.of(weight, bias)
    assert (linear.prepared is not None) == (outs == 1040)
    upstream = torch.randn(40, outs)
    inputs = (x, weight, bias)
    ours = torch.autograd.grad((linear(x) * upstream).sum(), inputs)
    theirs = torch.autograd.grad((F.linear(x, weight, bias) * upstream).sum(), inputs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("outs", [688, 128])
def test_a_pair_is_two_plain_layers_and_their_gradients(outs: int) -> None:
    x = torch.randn(40, 192, requires_grad=True)
    first, second = weights(outs, 192).requires_grad_(), (-weights(outs, 192)).requires_grad_()
    pair = PackedPair.of(first, second)
    assert (pair.joined.prepared is not None) == (outs == 688)
    inputs = (x, first, second)
    for got, want in zip(pair(x), (F.linear(x, first), F.linear(x, second)), strict=True):
        torch.testing.assert_close(got, want)
    products = [a.tanh() * b for a, b in (pair(x), (F.linear(x, first), F.linear(x, second)))]
    ours, theirs = (torch.autograd.grad(product.sum(), inputs) for product in products)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_rows_of_a_small_pair_do_not_depend_on_their_company() -> None:
    pair = PackedPair.of(weights(512, 192), weights(512, 192).flip(0))
    assert pair.joined.prepared is None
    x = torch.randn(1200, 192, generator=torch.Generator().manual_seed(1))
    first, second = pair(x)
    for rows in (ROW_MULTIPLE, 12, 32, 100, 500):
        a, b = pair(x[40 : 40 + rows])
        assert torch.equal(a, first[40 : 40 + rows])
        assert torch.equal(b, second[40 : 40 + rows])


def test_a_product_added_to_a_residual() -> None:
    x, residual, weight = torch.randn(8, 192), torch.randn(8, 64), weights(64, 192)
    linear = PackedLinear.of(weight)
    torch.testing.assert_close(linear.added_to(residual, x), residual + x @ weight.T)
    short = PackedLinear.of(weight.bfloat16())
    left, right = residual.bfloat16(), x.bfloat16()
    assert torch.equal(short.added_to(left, right), left + short(right))


def test_frozen_inputs_get_no_gradient() -> None:
    weight = weights(1040, 256).requires_grad_()
    PackedLinear.of(weight)(torch.randn(4, 256)).sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    x = torch.randn(4, 256, requires_grad=True)
    PackedLinear.of(weight.detach())(x).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
