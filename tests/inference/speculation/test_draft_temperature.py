"""How sure a head may be: the scale under which what comes out is likely."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.inference.speculation.draft_temperature import SCALES, Sureness


@pytest.mark.parametrize("scale", [0.2, 0.55, 1.4])
def test_the_scale_that_is_true_is_found(scale: float) -> None:
    rng, sureness = np.random.default_rng(0), Sureness()
    assert sureness.scale == 1.0
    for _ in range(300):
        gaps = -np.sort(rng.exponential(2.0, (4, 8)))
        gaps[:, 0] = 0.0
        chances = 1 / np.exp(gaps / scale).sum(1)
        sureness.learn(gaps, (rng.random(4) < chances).tolist())
    found = int(np.abs(SCALES - sureness.scale).argmin())
    assert abs(found - int(np.abs(SCALES - scale).argmin())) <= 1


def test_what_is_not_there_and_nothing_at_all_are_no_trouble() -> None:
    sureness = Sureness()
    sureness.learn(np.array([[0.0, -np.inf, -np.inf]]), [True])
    sureness.learn(np.array([[-np.inf] * 3]), [False])
    sureness.learn(np.zeros((0, 8)), [])
    assert sureness.scale == 1.0
