"""Norm and gate: kernels over rows, for the forward and the backward pass.

All arguments are addresses or sizes. M rows of width D or W, in fp32.
"""

from __future__ import annotations

import numpy as np
from numba import carray
from numba.np.unsafe.ndarray import to_fixed_tuple

from slipstream.kernels.avx512 import gate_row
from slipstream.kernels.compiling import kernel
from slipstream.kernels.memory import floats_at
from slipstream.kernels.numeric import ONE, ZERO, F, exp, squares, triple
from slipstream.kernels.processor import has_amx
from slipstream.kernels.team import for_team, part_count, part_number, run
from slipstream.kernels.tile import PANEL

_USE_AVX512 = has_amx()
"""All CPUs with AMX have AVX-512."""


@kernel
def add_norm_part(x, delta, weight, eps, total, normed, M, D, part, parts):
    """Compute one of `parts` parts of `add_norm`."""
    w = carray(floats_at(weight), (D,))
    tiny = carray(floats_at(eps), (1,))[0]
    for m in range(M * part // parts, M * (part + 1) // parts):
        row = m * D * 4
        s = carray(floats_at(x + row), (D,))
        if delta:
            a = carray(floats_at(x + row), (D,))
            b = carray(floats_at(delta + row), (D,))
            s = carray(floats_at(total + row), (D,))
            for i in range(D):
                s[i] = a[i] + b[i]
        scale = ONE / np.sqrt(squares(total + row if delta else x + row, D) / F(D) + tiny)
        out = carray(floats_at(normed + row), (D,))
        for i in range(D):
            out[i] = s[i] * scale * w[i]


@kernel
def add_part(x, delta, total, M, D, part, parts):
    """Compute one of `parts` parts of total = x + delta."""
    begin, size = M * D * part // parts, M * D * (part + 1) // parts - M * D * part // parts
    a, b = carray(floats_at(x + begin * 4), (size,)), carray(floats_at(delta + begin * 4), (size,))
    s = carray(floats_at(total + begin * 4), (size,))
    for i in range(size):
        s[i] = a[i] + b[i]


@for_team
def _add_norm_shared(p):
    add_norm_part(*to_fixed_tuple(carray(p, (8,)), 8), part_number(), part_count())


def add_norm(
    x: int, delta: int, weight: int, eps: int, total: int, normed: int, M: int, D: int
) -> None:
    """Compute total = x + delta and normed = total / rms(total) * weight over M rows of D.

    If `delta` is 0, the total is `x` and `total` is not written. `eps` points to one number.
    """
    run(add_norm_part, _add_norm_shared, (x, delta, weight, eps, total, normed, M, D), M * D)


@kernel
def _norm_backward(x, weight, eps, grad, more, dx, dw, M, D, part, parts):
    w = carray(floats_at(weight), (D,))
    tiny = carray(floats_at(eps), (1,))[0]
    sums = carray(floats_at(dw + part * D * 4), (D,))
    for i in range(D):
        sums[i] = ZERO
    for m in range(M * part // parts, M * (part + 1) // parts):
        row = m * D * 4
        s = carray(floats_at(x + row), (D,))
        g = carray(floats_at(grad + row), (D,))
        along = triple(grad + row, weight, x + row, D)
        scale = ONE / np.sqrt(squares(x + row, D) / F(D) + tiny)
        back = along * scale * scale * scale / F(D)
        out = carray(floats_at(dx + row), (D,))
        if more:
            r = carray(floats_at(more + row), (D,))
            for i in range(D):
                out[i] = r[i] + (g[i] * w[i] * scale - s[i] * back)
        else:
            for i in range(D):
                out[i] = g[i] * w[i] * scale - s[i] * back
        for i in range(D):
            sums[i] += g[i] * s[i] * scale


@for_team
def _norm_backward_shared(p):
    _norm_backward(*to_fixed_tuple(carray(p, (9,)), 9), part_number(), part_count())


def norm_backward(
    x: int, weight: int, eps: int, grad: int, more: int, dx: int, dw: int, M: int, D: int
) -> None:
    """Compute the gradients of `add_norm` from the gradient `grad` of the normed rows.

    `dx` is the gradient of the rows, plus `more` unless that is 0. `dw` is the gradient of the
    weight. It has one row of D, initially zero, for each of torch's threads; the caller adds them.
    """
    run(
        _norm_backward, _norm_backward_shared, (x, weight, eps, grad, more, dx, dw, M, D), 2 * M * D
    )


@kernel
def _gated(gate, up):
    """Return silu(gate) * up."""
    return gate / (ONE + exp(-gate)) * up


@kernel
def gate_part(both, out, M, W, part, parts):
    """Compute one of `parts` parts of `gate`."""
    for m in range(M * part // parts, M * (part + 1) // parts):
        if _USE_AVX512 and W % PANEL == 0:
            gate_row(both + m * W * 8, both + m * W * 8 + W * 4, out + m * W * 4, W)
            continue
        g = carray(floats_at(both + m * W * 8), (W,))
        u = carray(floats_at(both + m * W * 8 + W * 4), (W,))
        o = carray(floats_at(out + m * W * 4), (W,))
        for i in range(W):
            o[i] = _gated(g[i], u[i])


@for_team
def _gate_shared(p):
    gate_part(*to_fixed_tuple(carray(p, (4,)), 4), part_number(), part_count())


def gate(both: int, out: int, M: int, W: int) -> None:
    """Compute out (M, W) = silu(gate) * up. The rows of `both` hold W gates, then W ups."""
    run(gate_part, _gate_shared, (both, out, M, W), M * W)


@kernel
def _gate_backward(both, grad, dboth, M, W, part, parts):
    for m in range(M * part // parts, M * (part + 1) // parts):
        first = m * W * 8
        g = carray(floats_at(both + first), (W,))
        u = carray(floats_at(both + first + W * 4), (W,))
        d = carray(floats_at(grad + m * W * 4), (W,))
        dg = carray(floats_at(dboth + first), (W,))
        du = carray(floats_at(dboth + first + W * 4), (W,))
        for i in range(W):
            s = ONE / (ONE + exp(-g[i]))
            dg[i] = d[i] * u[i] * s * (ONE + g[i] * (ONE - s))
            du[i] = d[i] * g[i] * s


@for_team
def _gate_backward_shared(p):
    _gate_backward(*to_fixed_tuple(carray(p, (5,)), 5), part_number(), part_count())


def gate_backward(both: int, grad: int, dboth: int, M: int, W: int) -> None:
    """Compute the gradient of `both`, in the same layout."""
    run(_gate_backward, _gate_backward_shared, (both, grad, dboth, M, W), 2 * M * W)
