"""The backward pass of causal attention by the matrix unit, of what is rounded to bf16.

`attend_backward` is the same in fp32, and takes this where it can. Scores are computed twice, once
with queries as rows, for the gradients of queries, and once with keys as rows, for those of keys
and values: to turn them round would take longer. Sums are fp32; queries, keys, values and the
gradient are rounded to bf16, and so are weights and their gradients. T is taken in blocks of 32
rows, and K is a multiple of 32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types
from numba.extending import intrinsic

from slipstream.kernels.avx512 import exp, keep_narrow, load
from slipstream.kernels.compiling import kernel
from slipstream.kernels.dots import dots
from slipstream.kernels.memory import (
    LINE,
    aligned,
    floats_at,
    halves_at,
    hold,
    ints_at,
    words_at,
)
from slipstream.kernels.numeric import ZERO
from slipstream.kernels.tile import PANEL
from slipstream.kernels.tile_amx import (
    MOST_ROWS,
    PAIRS,
    configure,
    release,
    round_in_sixteens,
    two_panels_amx,
)

ROWS = MOST_ROWS
"""Rows of a block; widths of heads are multiples of it."""

_NEVER = np.float32(1e30)
"""The logarithm of the denominator of a row that is none: its weights are next to zero."""

_U, _SIXTEEN = np.uint32, np.uint32(16)


@kernel
def _narrow(source, step, rows, T, Tp, K):
    """T rows, `step` bytes apart, to bf16 one after another, and zeros up to Tp rows."""
    for t in range(T):
        round_in_sixteens(source + t * step, rows + 2 * K * t, K)
    rest = carray(halves_at(rows + 2 * K * T), ((Tp - T) * K,))
    for i in range((Tp - T) * K):
        rest[i] = 0


@kernel
def _as_outputs(rows, out, Tp, K):
    """Rows as the weights of sixteen outputs each: [block][pair of places][row][2]."""
    half = K // 2
    for block in range(Tp // PANEL):
        at = 2 * block * PANEL * K
        a, o = carray(words_at(rows + at), (PANEL, half)), carray(words_at(out + at), (half, PANEL))
        for i in range(half):
            for t in range(PANEL):
                o[i, t] = a[t, i]


@kernel
def _as_inputs(rows, out, Tp, K):
    """Rows as inputs that are summed over: [pair of rows][place][2]."""
    for pair in range(Tp // 2):
        at = 4 * pair * K
        a, b = carray(halves_at(rows + at), (K,)), carray(halves_at(rows + at + 2 * K), (K,))
        o = carray(words_at(out + at), (K,))
        for i in range(K):
            o[i] = _U(_U(a[i]) | _U(_U(b[i]) << _SIXTEEN))


@kernel
def _lay_out(source, step, rows, outs, ins, T, Tp, K):
    """T rows, `step` bytes apart, in all three ways; `ins` 0: but the last."""
    _narrow(source, step, rows, T, Tp, K)
    _as_outputs(rows, outs, Tp, K)
    if ins:
        _as_inputs(rows, ins, Tp, K)


@kernel
def _numbers_of(grads, outs, row_step, logs, log_step, mass, along, T, Tp, K):
    """Logarithms of the denominators, and the products of gradients and results, of T rows."""
    m, a = carray(floats_at(mass), (Tp,)), carray(floats_at(along), (Tp,))
    for t in range(T):
        dots(grads + t * row_step, outs + t * row_step, K, 1, along + 4 * t)
        m[t] = carray(floats_at(logs + t * log_step), (1,))[0]
    for t in range(T, Tp):
        m[t] = _NEVER
        a[t] = ZERO


@kernel
def _products(rows, weights, first, count, K, out, step):
    """Of a block of rows with `count` panels of weights from panel `first` on, an even number."""
    for p in range(0, count, 2):
        two_panels_amx(
            ROWS, rows, 2 * K, weights + 2 * PANEL * K * (first + p), 4 * PANEL, 2 * PANEL * K,
            K // 2, out + 4 * PANEL * p, step, 4 * PANEL, 0,
        )  # fmt: skip


@kernel
def _sums(weights, step, values, count, K, out):
    """Of `count` rows of values by a block of rows of weights: (32, K)."""
    for i in range(0, K, 2 * PANEL):
        two_panels_amx(
            ROWS, weights, step, values + 4 * i, 4 * K, 4 * PANEL, count // 2,
            out + 4 * i, 4 * K, 4 * PANEL, 0,
        )  # fmt: skip


@intrinsic
def _weigh_sixteen(
    typingctx: Any, scores: Any, dweights: Any, mass: Any, less: Any, weights: Any, narrow: Any
) -> Any:
    """Sixteen weights exp(scores - mass) and gradients weight * (dweights - less), to bf16; of six
    addresses."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        scores, dweights, mass, less = (load(builder, address) for address in args[:4])
        weight = exp(builder, builder.fsub(scores, mass))
        keep_narrow(builder, weight, args[4])
        keep_narrow(builder, builder.fmul(weight, builder.fsub(dweights, less)), args[5])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


@kernel
def _zero(out, count):
    o = carray(halves_at(out), (count,))
    for j in range(count):
        o[j] = 0


@kernel
def _repeat(number, out):
    value = carray(floats_at(number), (1,))[0]
    o = carray(floats_at(out), (PANEL,))
    for j in range(PANEL):
        o[j] = value


@kernel
def _over_keys(scores, dweights, step, weights, narrow, first, n, logs, along, room):
    """Gradients of the scores, in bf16, of a block of queries from `first` on over n keys; the
    weights, too, which are not needed. `room`: for 32 numbers."""
    for r in range(ROWS):
        seen, at, to = first + r + 1, r * step, r * step // 2
        _repeat(logs + 4 * (first + r), room)
        _repeat(along + 4 * (first + r), room + 4 * PANEL)
        for j in range(0, seen, PANEL):
            _weigh_sixteen(
                scores + at + 4 * j, dweights + at + 4 * j, room, room + 4 * PANEL,
                weights + to + 2 * j, narrow + to + 2 * j,
            )  # fmt: skip
        _zero(narrow + to + 2 * seen, n - seen)


@kernel
def _over_queries(scores, dweights, step, weights, narrow, n, logs, along):
    """Weights and gradients of the scores, both in bf16, of a block of keys over n queries from the
    same place on."""
    for r in range(ROWS):
        at, to = r * step, r * step // 2
        for j in range(r // PANEL * PANEL, n, PANEL):
            _weigh_sixteen(
                scores + at + 4 * j, dweights + at + 4 * j, logs + 4 * j, along + 4 * j,
                weights + to + 2 * j, narrow + to + 2 * j,
            )  # fmt: skip
        _zero(weights + to, r)
        _zero(narrow + to, r)


@kernel
def _take(block, out, step, rows, K, first):
    """Rows of a block to `out`, `step` bytes apart: written by the `first`, added by others."""
    for t in range(rows):
        a = carray(floats_at(block + 4 * K * t), (K,))
        o = carray(floats_at(out + step * t), (K,))
        if first:
            for i in range(K):
                o[i] = a[i]
        else:
            for i in range(K):
                o[i] += a[i]


@kernel
def backward_amx_part(
    q, keys, values, grad, out, logs, dq, dk, dv, dv_step, starts, slots, B, S, longest, Q, H, K,
    part, parts
):  # fmt: skip
    """See `attend_backward.attend_backward`; one of `parts` parts."""
    G = Q // H
    first, place = carray(ints_at(starts), (B + 1,)), carray(ints_at(slots), (B,))
    most = (longest + ROWS - 1) // ROWS * ROWS
    size = 2 * most * K
    # Each of the four as rows, as outputs and, but for the values, as inputs.
    room = np.empty(LINE + 11 * size, np.uint8)
    q_rows = aligned(room.ctypes.data)
    g_rows, k_rows, v_rows = q_rows + size, q_rows + 2 * size, q_rows + 3 * size
    q_outs, g_outs, k_outs, v_outs = (
        q_rows + 4 * size, q_rows + 5 * size, q_rows + 6 * size, q_rows + 7 * size
    )  # fmt: skip
    q_ins, g_ins, k_ins = q_rows + 8 * size, q_rows + 9 * size, q_rows + 10 * size
    # Not a power of two: lines of a column would share few places of the cache.
    step = 4 * (most + PANEL)
    block_room = np.empty(LINE + 3 * ROWS * step + 4 * ROWS * K, np.uint8)
    scores = aligned(block_room.ctypes.data)
    dweights = scores + ROWS * step
    s_narrow, d_narrow = dweights + ROWS * step, dweights + ROWS * step + ROWS * step // 2
    sums = d_narrow + ROWS * step // 2
    numbers = np.empty(2 * most + 2 * PANEL, np.float32)
    mass, along = numbers.ctypes.data, numbers.ctypes.data + 4 * most
    repeated = along + 4 * most
    q_step, k_step = Q * K * 4, H * K * 4
    configure(PAIRS)
    # Neighbours go to different threads, for sequences may come in order of length.
    for task in range(part, B * H, parts):
        b, h = task // H, task % H
        begin, T = first[b], first[b + 1] - first[b]
        Tp = (T + ROWS - 1) // ROWS * ROWS
        own = (h * S + place[b]) * K * 4
        _lay_out(keys + own, 4 * K, k_rows, k_outs, k_ins, T, Tp, K)
        _lay_out(values + own, 4 * K, v_rows, v_outs, 0, T, Tp, K)
        for g in range(G):
            head = begin * Q + h * G + g
            rows, grads, outs = q + head * K * 4, grad + head * K * 4, out + head * K * 4
            _numbers_of(grads, outs, q_step, logs + 4 * head, 4 * Q, mass, along, T, Tp, K)
            _lay_out(rows, q_step, q_rows, q_outs, q_ins, T, Tp, K)
            _lay_out(grads, q_step, g_rows, g_outs, g_ins, T, Tp, K)
            for i in range(0, Tp, ROWS):
                at, some = 2 * K * i, min(ROWS, T - i)
                n = i + ROWS
                _products(q_rows + at, k_outs, 0, n // PANEL, K, scores, step)
                _products(g_rows + at, v_outs, 0, n // PANEL, K, dweights, step)
                _over_keys(scores, dweights, step, s_narrow, d_narrow, i, n, mass, along, repeated)
                _sums(d_narrow, step // 2, k_ins, n, K, sums)
                _take(sums, dq + (head * K + i * Q * K) * 4, q_step, some, K, True)
                n = Tp - i
                _products(k_rows + at, q_outs, i // PANEL, n // PANEL, K, scores, step)
                _products(v_rows + at, g_outs, i // PANEL, n // PANEL, K, dweights, step)
                _over_queries(
                    scores, dweights, step, s_narrow, d_narrow, n, mass + 4 * i, along + 4 * i
                )
                _sums(d_narrow, step // 2, q_ins + at, n, K, sums)
                _take(sums, dk + ((begin + i) * H + h) * K * 4, k_step, some, K, g == 0)
                _sums(s_narrow, step // 2, g_ins + at, n, K, sums)
                _take(sums, dv + (begin + i) * dv_step + h * K * 4, dv_step, some, K, g == 0)
    release()
    hold(room)
    hold(block_room)
    hold(numbers)
