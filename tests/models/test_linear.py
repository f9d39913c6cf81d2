"""Prepared linear layers: the rows of exact mode, and gradients of a plain layer."""

from __future__ import annotations

import math
import platform

import pytest
import torch
from torch.nn import functional as F

from slipstream.models.linear import PREPARED_FROM, PackedLinear, worth_preparing

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


@pytest.mark.parametrize(("outs", "ins"), [(1024, 192), (512, 512), (3072, 512), (512, 1536)])
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
    assert torch.equal(linear(x.view(3, 400, ins)), together.view(3, 400, outs))


@pytest.mark.parametrize("shape", [(40, 256), (2, 20, 256)])
def test_gradients_are_those_of_a_plain_layer(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, requires_grad=True)
    weight, bias = weights(640, 256).requires_grad_(), torch.randn(640, requires_grad=True)
    linear = PackedLinear.of(weight, bias)
    assert linear.prepared is not None
    upstream = torch.randn(*shape[:-1], 640)
    inputs = (x, weight, bias)
    ours = torch.autograd.grad((linear(x) * upstream).sum(), inputs)
    theirs = torch.autograd.grad((F.linear(x, weight, bias) * upstream).sum(), inputs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_frozen_inputs_get_no_gradient() -> None:
    weight = weights(640, 256).requires_grad_()
    PackedLinear.of(weight)(torch.randn(4, 256)).sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    x = torch.randn(4, 256, requires_grad=True)
    PackedLinear.of(weight.detach())(x).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
