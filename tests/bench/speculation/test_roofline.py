"""The least time of a rollout, computed by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from slipstream.bench.shapes import SHAPES, matmul_parameters
from slipstream.bench.speculation import roofline
from slipstream.bench.speculation.roofline import MachineRates, least_seconds, measure_rates

CONFIG = SHAPES["tiny"]
WEIGHTS = sum(matmul_parameters(CONFIG))


@pytest.mark.parametrize("size", [4, 2])
def test_with_slow_memory_accepted_drafts_are_free(size: int) -> None:
    # Multiplication costs nothing. A step reads the weights and, in three layers, keys and values
    # of one head of width 16 for each token of the context.
    rates = MachineRates(flops=1e30, bytes=1.0, itemsize=size)
    plain = 2 * size * WEIGHTS + (10 + 11) * 3 * 2 * 16 * size
    assert least_seconds(CONFIG, rates, [10], [2], 0) == pytest.approx(plain)
    assert least_seconds(CONFIG, rates, [10], [2], 3) == pytest.approx(plain / 4)
    # A request that runs longer than the other one reads the weights again.
    both = least_seconds(CONFIG, rates, [10, 10], [2, 1], 0)
    assert both == pytest.approx(plain + 10 * 3 * 2 * 16 * size)


def test_with_slow_multiplication_drafts_gain_nothing() -> None:
    rates = MachineRates(flops=1.0, bytes=1e30, itemsize=4)
    plain = least_seconds(CONFIG, rates, [10], [2], 0)
    assert plain == pytest.approx(2 * WEIGHTS * 12 + (10 + 11) * 3 * 4 * 2 * 16)
    assert least_seconds(CONFIG, rates, [10], [2], 7) == pytest.approx(plain)


def test_the_best_number_of_drafts_is_used() -> None:
    # Reading the weights takes the time of multiplying two tokens with them.
    rates = MachineRates(flops=float(2 * WEIGHTS), bytes=2.0 * WEIGHTS, itemsize=4)
    plain = least_seconds(CONFIG, rates, [0], [1], 0)
    assert (plain, least_seconds(CONFIG, rates, [0], [1], 7)) == (2.0, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rates_match_the_timed_operations(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    results, seconds = [], iter([0.75, 0.5, 0.25])

    def timed(call: Callable[[], torch.Tensor]) -> float:
        results.append(call())
        return next(seconds)

    monkeypatch.setattr(roofline, "_seconds", timed)
    rates = measure_rates(dtype, CONFIG, torch.device("cpu"))
    wide, product, total = results
    assert (wide.dtype, product.dtype) == (torch.float32, dtype)
    assert rates.itemsize == dtype.itemsize
    # The product of two n x n matrices takes n multiply-adds per entry. The sum is over fp32 ones
    # with the bytes of the weights. The faster of the two products counts.
    assert rates.flops == 2 * 2 * len(product) ** 3
    assert rates.bytes == 4 * 4 * total.item() == 4 * dtype.itemsize * WEIGHTS
