"""The backward pass of causal attention over a sequence's own keys, in fp32.

The weights are computed anew from the logarithms of the denominators (Dao et al. 2022,
FlashAttention), head by head, so that what belongs to a head stays in a cache; what lies in the
future is left out. A head's five products run through `tile`. Every argument is an address or a
size. B sequences of T tokens, Q query heads, H key-value heads, K head width.
"""

from __future__ import annotations

import numpy as np
from numba import carray
from numba.np.unsafe.ndarray import to_fixed_tuple

from slipstream.kernels.compiling import kernel
from slipstream.kernels.memory import floats_at, hold
from slipstream.kernels.numeric import ZERO, exp
from slipstream.kernels.team import for_team, part_count, part_number, run
from slipstream.kernels.tile import PANEL, tiles

_BLOCK = PANEL
"""Queries whose scores are computed at once, over the keys up to the last of them, in whole panels;
larger blocks compute more that lies in the future, which short responses feel."""


@kernel
def _panels(rows, out, T, W):
    """Rows (T, W) as panels of 16 rows each, [panel][column][row]: as weights of a product."""
    for p in range(T // PANEL):
        o = carray(floats_at(out + p * PANEL * W * 4), (W * PANEL,))
        for j in range(PANEL):
            a = carray(floats_at(rows + (p * PANEL + j) * W * 4), (W,))
            for i in range(W):
                o[i * PANEL + j] = a[i]


@kernel
def _turned(rows, out, T, W):
    """Rows (T, W) to (W, T)."""
    a, o = carray(floats_at(rows), (T * W,)), carray(floats_at(out), (W * T,))
    for i in range(W):
        for t in range(T):
            o[i * T + t] = a[t * W + i]


@kernel
def _gather(source, source_step, out, T, K, W):
    """T rows of K numbers, `source_step` bytes apart, to rows of W at `out`."""
    for t in range(T):
        a = carray(floats_at(source + t * source_step), (K,))
        o = carray(floats_at(out + t * W * 4), (K,))
        for i in range(K):
            o[i] = a[i]


@kernel
def _add_turned(columns, out, out_step, T, Tp, K, first):
    """(K, Tp) to T rows of K, `out_step` bytes apart: written by the `first`, added by others."""
    a = carray(floats_at(columns), (K * Tp,))
    for t in range(T):
        o = carray(floats_at(out + t * out_step), (K,))
        if first:
            for i in range(K):
                o[i] = a[i * Tp + t]
        else:
            for i in range(K):
                o[i] += a[i * Tp + t]


@kernel
def _weigh(scores, dweights, step, log, log_step, along, T, Tp):
    """Scores and gradients of the weights, rows `step` bytes apart, to weights and gradients of the
    scores; zeros for keys in the future, up to the end of a block."""
    towards = carray(floats_at(along), (Tp,))
    for i in range(Tp):
        width = (i // _BLOCK + 1) * _BLOCK
        s = carray(floats_at(scores + i * step), (width,))
        d = carray(floats_at(dweights + i * step), (width,))
        seen = i + 1 if i < T else 0
        if seen:
            mass = carray(floats_at(log + i * log_step), (1,))[0]
            less = towards[i]
            for j in range(seen):
                s[j] = exp(s[j] - mass)
            for j in range(seen):
                d[j] = s[j] * (d[j] - less)
        for j in range(seen, width):
            s[j] = ZERO
            d[j] = ZERO


@kernel
def _scores(rows, panels, W, out, step, zeros, Tp):
    """Products of every row with the keys up to the end of its block; `panels` as weights."""
    for block in range(0, Tp, _BLOCK):
        x = rows + block * W * 4
        for p in range((block + _BLOCK) // PANEL):
            w = panels + p * PANEL * W * 4
            to = out + block * step + p * PANEL * 4
            tiles(x, W * 4, w, 4 * PANEL, W, zeros, to, step, _BLOCK, w, 0)


@kernel
def _over_rows(turned, weights, step, W, out, zeros, Tp):
    """(W, Tp) = sum over the rows from each panel of keys on: what the keys get from later rows."""
    for p in range(Tp // PANEL):
        j = p * PANEL
        w = weights + j * step + j * 4
        tiles(turned + j * 4, Tp * 4, w, step, Tp - j, zeros, out + j * 4, Tp * 4, W, w, 0)


@kernel
def _backward_part(
    q, keys, values, grad, out, logs, dq, dk, dv, dv_step, B, T, Q, H, K, part, parts
):
    G = Q // H
    Tp = (T + _BLOCK - 1) // _BLOCK * _BLOCK
    W = (K + PANEL - 1) // PANEL * PANEL
    # Not a power of two: lines of a column would share few places of the cache.
    step = (Tp + PANEL) * 4
    scores, dweights = np.empty(Tp * step // 4, np.float32), np.empty(Tp * step // 4, np.float32)
    s, d = scores.ctypes.data, dweights.ctypes.data
    # Zeros: rows beyond T and columns beyond K stay.
    room = np.zeros(8 * Tp * W + Tp + PANEL, np.float32)
    size = Tp * W * 4
    k_rows = room.ctypes.data
    row, turned = k_rows + size, k_rows + 2 * size
    g_row, g_turned = k_rows + 3 * size, k_rows + 4 * size
    k_panels, v_panels = k_rows + 5 * size, k_rows + 6 * size
    result = k_rows + 7 * size
    along = k_rows + 8 * size
    zeros = along + Tp * 4
    towards = carray(floats_at(along), (Tp,))
    for task in range(B * H * part // parts, B * H * (part + 1) // parts):
        b, h = task // H, task % H
        _gather(values + task * T * K * 4, K * 4, k_rows, T, K, W)
        _panels(k_rows, v_panels, Tp, W)
        _gather(keys + task * T * K * 4, K * 4, k_rows, T, K, W)
        _panels(k_rows, k_panels, Tp, W)
        for g in range(G):
            head = h * G + g
            at, row_step = (b * T * Q + head) * K * 4, Q * K * 4
            _gather(q + at, row_step, row, T, K, W)
            _gather(grad + at, row_step, g_row, T, K, W)
            for t in range(T):
                a = carray(floats_at(grad + at + t * row_step), (K,))
                o = carray(floats_at(out + at + t * row_step), (K,))
                sum_ = ZERO
                for i in range(K):
                    sum_ += a[i] * o[i]
                towards[t] = sum_
            _scores(row, k_panels, W, s, step, zeros, Tp)
            _scores(g_row, v_panels, W, d, step, zeros, Tp)
            _weigh(s, d, step, logs + (b * T * Q + head) * 4, Q * 4, along, T, Tp)
            for block in range(0, Tp, _BLOCK):
                x, n = d + block * step, block + _BLOCK
                for i in range(0, W, PANEL):
                    w, to = k_rows + i * 4, result + (block * W + i) * 4
                    tiles(x, step, w, W * 4, n, zeros, to, W * 4, _BLOCK, w, 0)
            for t in range(T):
                a = carray(floats_at(result + t * W * 4), (K,))
                o = carray(floats_at(dq + at + t * row_step), (K,))
                for i in range(K):
                    o[i] = a[i]
            _turned(row, turned, Tp, W)
            _turned(g_row, g_turned, Tp, W)
            _over_rows(turned, d, step, W, result, zeros, Tp)
            _add_turned(result, dk + (b * T * H + h) * K * 4, H * K * 4, T, Tp, K, g == 0)
            _over_rows(g_turned, s, step, W, result, zeros, Tp)
            _add_turned(result, dv + b * T * dv_step + h * K * 4, dv_step, T, Tp, K, g == 0)
    hold(scores)
    hold(dweights)
    hold(room)


@for_team
def _backward_shared(p):
    _backward_part(*to_fixed_tuple(carray(p, (15,)), 15), part_number(), part_count())


def attend_backward(
    q: int,
    keys: int,
    values: int,
    grad: int,
    out: int,
    logs: int,
    dq: int,
    dk: int,
    dv: int,
    dv_step: int,
    B: int,
    T: int,
    Q: int,
    H: int,
    K: int,
) -> None:
    """From the gradient (B, T, Q, K) of `out`, those of the queries `dq` (B, T, Q, K), the keys
    `dk` (B, T, H, K) and the values, whose rows of (H, K) lie `dv_step` bytes apart. Queries
    (B, T, Q, K) are scaled, keys and values (B, H, T, K), `logs` (B, T, Q) the logarithms of the
    denominators. Takes 8 T T bytes beside them for each thread."""
    arguments = (q, keys, values, grad, out, logs, dq, dk, dv, dv_step, B, T, Q, H, K)
    run(_backward_part, _backward_shared, arguments, B * Q * T * T * K // 16)
