"""Draft temperature: the one with the highest likelihood is found."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.inference.speculation.draft_temperature import TEMPERATURES, DraftTemperature


@pytest.mark.parametrize("true", [0.2, 0.55, 1.4])
def test_the_true_temperature_is_found(true: float) -> None:
    rng, temperature = np.random.default_rng(0), DraftTemperature()
    assert temperature.value == 1.0
    for _ in range(300):
        gaps = -np.sort(rng.exponential(2.0, (4, 8)))
        gaps[:, 0] = 0.0
        likelihoods = 1 / np.exp(gaps / true).sum(1)
        temperature.learn(gaps, (rng.random(4) < likelihoods).tolist())
    found = int(np.abs(TEMPERATURES - temperature.value).argmin())
    assert abs(found - int(np.abs(TEMPERATURES - true).argmin())) <= 1


def test_missing_candidates_and_empty_batches_are_ignored() -> None:
    temperature = DraftTemperature()
    temperature.learn(np.array([[0.0, -np.inf, -np.inf]]), [True])
    temperature.learn(np.array([[-np.inf] * 3]), [False])
    temperature.learn(np.zeros((0, 8)), [])
    assert temperature.value == 1.0
