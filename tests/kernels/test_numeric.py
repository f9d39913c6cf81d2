"""Exponential, sums and maximum, compared with float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numba import njit

from slipstream.kernels.numeric import exp, largest, squares, total, triple


@njit
def exps(x: np.ndarray, out: np.ndarray) -> None:
    for i in range(len(x)):
        out[i] = exp(x[i])


def test_exp_is_exact_to_two_units_in_the_last_place() -> None:
    x = np.linspace(-86.9, 87.9, 400_001).astype(np.float32)
    out = np.empty_like(x)
    exps(x, out)
    exact = np.exp(x.astype(np.float64))
    assert float(np.max(np.abs(out - exact) / exact)) < 2 * 2**-23


def test_exp_is_clamped_at_the_ends_of_its_range() -> None:
    x = np.array([0.0, -0.0, -1e9, -np.inf, 1e9, np.nan], dtype=np.float32)
    out = np.empty_like(x)
    exps(x, out)
    assert out[:2].tolist() == [1.0, 1.0]
    assert out[2] == out[3] == pytest.approx(math.exp(-87), rel=1e-6)
    assert out[4] == pytest.approx(math.exp(88), rel=1e-6)
    assert math.isnan(out[5])


@pytest.mark.parametrize("n", [1, 5, 16, 64, 100])
def test_sums_match_float64(n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    x, y, z = torch.randn(3, n, generator=generator).unbind()
    at = [t.data_ptr() for t in (x, y, z)]
    wide = [t.double() for t in (x, y, z)]
    assert squares(at[0], n) == pytest.approx(float((wide[0] ** 2).sum()), rel=1e-6)
    assert total(at[0], n) == pytest.approx(float(wide[0].sum()), abs=1e-5)
    exact = float((wide[0] * wide[1] * wide[2]).sum())
    assert triple(*at, n) == pytest.approx(exact, abs=1e-5)


@njit
def largest_of(x: np.ndarray) -> float:
    found: float = largest(x.ctypes.data, len(x))
    return found


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 224])
def test_largest_is_the_maximum_of_numbers_of_either_sign(n: int) -> None:
    rng = np.random.default_rng(n)
    for shift in (-1e30, -1.0, 0.0, 1e-42):
        x = (rng.standard_normal(n) * 10.0 ** rng.uniform(-44, 38, n) + shift).astype(np.float32)
        assert largest_of(x) == x.max()
    x[n // 2] = np.inf
    assert largest_of(x) == np.inf
    x[:] = -np.inf
    assert largest_of(x) == -np.inf


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_largest_of_numbers_with_nan_is_nan(sign: float) -> None:
    x = np.ones(40, np.float32)
    x[7] = np.copysign(np.float32(np.nan), np.float32(sign))
    assert math.isnan(largest_of(x))
