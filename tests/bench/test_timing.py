"""Ratios of interleaved steps."""

from __future__ import annotations

import math

import pytest

from slipstream.bench.timing import step_ratio


def test_a_disturbed_step_does_not_change_the_ratio_of_steps() -> None:
    ratio, error = step_ratio([2.0, 4.0, 6.0, 600.0], [1.0, 2.0, 3.0, 4.0])
    assert ratio == pytest.approx(2.0)
    assert error == pytest.approx(0.0)
    # Logarithms -0.1, 0, 0.2: their median absolute deviation is 0.1.
    above, below = [math.exp(-0.1), 1.0, math.exp(0.2)], [1.0, 1.0, 1.0]
    ratio, error = step_ratio(above, below)
    assert ratio == pytest.approx(1.0)
    assert error == pytest.approx(1.2533 * 1.4826 * 0.1 / math.sqrt(3))
