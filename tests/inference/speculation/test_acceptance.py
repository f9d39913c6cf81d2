"""How often drafts are right, by depth."""

from __future__ import annotations

import pytest

from slipstream.inference.speculation.acceptance import AcceptanceCurve


def test_the_curve_is_per_depth_and_extends_beyond_what_was_tried() -> None:
    curve = AcceptanceCurve(kept=1e12, guess_weight=1e-9)
    for _ in range(10):
        curve.record([2, 2, 2, 2], [0, 1, 2, 2])
    assert curve.rates(1)[-1] == pytest.approx(3 / 4)
    assert curve.rates(2)[-1] == pytest.approx(2 / 3)
    assert curve.rates(6)[-1] == pytest.approx(2 / 3)
    assert curve.expected(2) == pytest.approx(3 / 4 + 1 / 2)
