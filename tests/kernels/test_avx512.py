"""AVX-512 intrinsics of 16 lanes, compared with torch in fp64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from slipstream.kernels.avx512 import gate_panel, gate_row, rotate_row, softmax_row
from slipstream.kernels.compiling import kernel
from slipstream.kernels.processor import has_amx

pytestmark = pytest.mark.skipif(not has_amx(), reason="no AMX")


@kernel
def _softmax(scores: int, weights: int, sees: int, width: int) -> tuple[float, float]:
    both: tuple[float, float] = softmax_row(scores, weights, sees, width)
    return both


@kernel
def _rotate(
    x: int, norm: int, eps: int, cos: int, sin: int, times: float, out: int, half: int
) -> None:
    rotate_row(x, norm, eps, cos, sin, times, out, half)


@kernel
def _gate(gates: int, ups: int, out: int, count: int) -> None:
    gate_row(gates, ups, out, count)


@kernel
def _panel(gates: int, ups: int, bias: int, up_bias: int, out: int, step: int, rows: int) -> None:
    gate_panel(gates, ups, bias, up_bias, out, step, rows)


def softmax(scores: Tensor, sees: int, width: int) -> tuple[float, float, Tensor]:
    """Return largest score, sum and weights. Weights beyond `width` are not written."""
    weights = torch.full((len(scores),), 7.0, dtype=torch.bfloat16)
    top, mass = _softmax(scores.data_ptr(), weights.data_ptr(), sees, width)
    return top, mass, weights


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("sees", [1, 15, 16, 17, 31, 32, 33, 64])
def test_softmax_row_matches_a_softmax(sees: int) -> None:
    scores = 5 * draw(96, seed=sees)
    scores[sees:] = 1000.0  # not seen
    top, mass, weights = softmax(scores, sees, 64)
    seen = scores[:sees].double()
    assert top == float(seen.max())
    exact = (seen - seen.max()).exp()
    assert mass == pytest.approx(float(exact.sum()), rel=1e-6)
    torch.testing.assert_close(weights[:sees].double(), exact, rtol=2**-8, atol=1e-30)
    assert not weights[sees:64].any()
    assert bool((weights[64:] == 7).all())


def test_softmax_row_does_not_depend_on_the_width() -> None:
    scores = draw(96)
    long, short = softmax(scores, 21, 96), softmax(scores, 21, 32)
    assert long[:2] == short[:2]
    assert torch.equal(long[2][:32], short[2][:32])


@pytest.mark.parametrize("place", [3, 20])
def test_softmax_row_of_nan_has_the_sum_nan(place: int) -> None:
    scores = draw(32)
    scores[place] = math.nan
    assert math.isnan(softmax(scores, 21, 32)[1])


@pytest.mark.parametrize("half", [16, 32])
@pytest.mark.parametrize("normed", [True, False])
def test_rotate_row_norms_and_rotates_a_head(half: int, normed: bool) -> None:
    x, norm, cos, sin = draw(4, 2 * half).unbind()
    eps, out = torch.tensor(1e-2), torch.empty(2 * half, dtype=torch.bfloat16)
    at = (x.data_ptr(), norm.data_ptr() if normed else 0, eps.data_ptr())
    _rotate(*at, cos.data_ptr(), sin.data_ptr(), 0.25, out.data_ptr(), half)
    wide = x.double()
    if normed:
        wide = wide / (wide.square().mean() + float(eps)).sqrt() * norm.double()
    left, right = wide[:half], wide[half:]
    (c_left, c_right), (s_left, s_right) = cos.double().view(2, half), sin.double().view(2, half)
    exact = torch.cat([left * c_left + right * s_left, right * c_right + left * s_right]) / 4
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-6)


def test_gate_row_is_silu_of_the_gates_times_ups() -> None:
    gates, ups = 8 * draw(64, seed=1), draw(64, seed=2)
    gates[:4] = torch.tensor([-90.0, 90.0, 0.0, -0.0])
    out = torch.empty(64)
    _gate(gates.data_ptr(), ups.data_ptr(), out.data_ptr(), 64)
    exact = torch.nn.functional.silu(gates.double()) * ups.double()
    torch.testing.assert_close(out.double(), exact, rtol=1e-6, atol=1e-30)


def test_gate_panel_gives_the_bits_of_gate_row() -> None:
    gates, ups, bias, up_bias = draw(5, 16, seed=1), draw(5, 16, seed=2), draw(16), draw(16, seed=3)
    out = torch.zeros(5, 48, dtype=torch.bfloat16)
    biases = (bias.data_ptr(), up_bias.data_ptr())
    _panel(gates.data_ptr(), ups.data_ptr(), *biases, out.data_ptr(), 96, 5)
    single = torch.empty(5, 16)
    all_gates, all_ups = (gates + bias).contiguous(), (ups + up_bias).contiguous()
    _gate(all_gates.data_ptr(), all_ups.data_ptr(), single.data_ptr(), 80)
    assert torch.equal(out[:, :16], single.bfloat16())
    assert not out[:, 16:].any()
