"""The least that a rollout can take, by hand."""

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
def test_slow_memory_makes_right_drafts_free(size: int) -> None:
    # Multiplying costs nothing: a step reads the weights and, in three layers, one head of 16
    # numbers of keys and of values for each token seen.
    rates = MachineRates(flops=1e30, bytes=1.0, itemsize=size)
    plain = 2 * size * WEIGHTS + (10 + 11) * 3 * 2 * 16 * size
    assert least_seconds(CONFIG, rates, [10], [2], 0) == pytest.approx(plain)
    assert least_seconds(CONFIG, rates, [10], [2], 3) == pytest.approx(plain / 4)
    # One that runs on when another has ended reads the weights again.
    both = least_seconds(CONFIG, rates, [10, 10], [2, 1], 0)
    assert both == pytest.approx(plain + 10 * 3 * 2 * 16 * size)


def test_where_multiplying_is_slow_no_draft_gains() -> None:
    rates = MachineRates(flops=1.0, bytes=1e30, itemsize=4)
    plain = least_seconds(CONFIG, rates, [10], [2], 0)
    assert plain == pytest.approx(2 * WEIGHTS * 12 + (10 + 11) * 3 * 4 * 2 * 16)
    assert least_seconds(CONFIG, rates, [10], [2], 7) == pytest.approx(plain)


def test_as_many_drafts_as_are_free_are_taken() -> None:
    # Reading the weights takes as long as multiplying two rows with them.
    rates = MachineRates(flops=float(2 * WEIGHTS), bytes=2.0 * WEIGHTS, itemsize=4)
    plain = least_seconds(CONFIG, rates, [0], [1], 0)
    assert (plain, least_seconds(CONFIG, rates, [0], [1], 7)) == (2.0, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rates_are_of_what_was_timed(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    results, seconds = [], iter([0.75, 0.5, 0.25])

    def timed(call: Callable[[], torch.Tensor]) -> float:
        results.append(call())
        return next(seconds)

    monkeypatch.setattr(roofline, "_seconds", timed)
    rates = measure_rates(dtype, CONFIG, torch.device("cpu"))
    wide, product, total = results
    assert (wide.dtype, product.dtype) == (torch.float32, dtype)
    assert rates.itemsize == dtype.itemsize
    # Every number of the product takes as many multiply-adds as it has rows; what was added up are
    # fp32 ones, as many bytes as the weights have. The faster of the two products counts.
    assert rates.flops == 2 * 2 * len(product) ** 3
    assert rates.bytes == 4 * 4 * total.item() == 4 * dtype.itemsize * WEIGHTS
