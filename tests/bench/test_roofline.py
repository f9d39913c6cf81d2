"""The least that a rollout can take, by hand."""

from __future__ import annotations

import pytest

from slipstream.bench.roofline import MachineRates, least_seconds, measure_rates
from slipstream.bench.shapes import SHAPES, matmul_parameters

CONFIG = SHAPES["tiny"]
WEIGHTS = sum(matmul_parameters(CONFIG))


def test_slow_memory_makes_right_drafts_free() -> None:
    # Multiplying costs nothing: a step reads the weights and, in two layers, one head of 16 numbers
    # of keys and of values for each token seen.
    rates = MachineRates(flops=1e30, bytes=1.0)
    plain = 2 * 4 * WEIGHTS + (10 + 11) * 2 * 2 * 16 * 4
    assert least_seconds(CONFIG, rates, [10], [2], 0) == pytest.approx(plain)
    assert least_seconds(CONFIG, rates, [10], [2], 3) == pytest.approx(plain / 4)
    # One that runs on when another has ended reads the weights again.
    both = least_seconds(CONFIG, rates, [10, 10], [2, 1], 0)
    assert both == pytest.approx(plain + 10 * 2 * 2 * 16 * 4)


def test_where_multiplying_is_slow_no_draft_gains() -> None:
    rates = MachineRates(flops=1.0, bytes=1e30)
    plain = least_seconds(CONFIG, rates, [10], [2], 0)
    assert plain == pytest.approx(2 * WEIGHTS * 12 + (10 + 11) * 2 * 4 * 2 * 16)
    assert least_seconds(CONFIG, rates, [10], [2], 7) == pytest.approx(plain)


def test_as_many_drafts_as_are_free_are_taken() -> None:
    # Reading the weights takes as long as multiplying two rows with them.
    rates = MachineRates(flops=float(2 * WEIGHTS), bytes=2.0 * WEIGHTS)
    plain = least_seconds(CONFIG, rates, [0], [100], 0)
    assert plain / least_seconds(CONFIG, rates, [0], [100], 7) == pytest.approx(2.0, rel=0.35)


def test_rates_of_this_machine_are_plausible() -> None:
    rates = measure_rates()
    assert 1e9 < rates.flops < 1e15
    assert 1e8 < rates.bytes < 1e13
