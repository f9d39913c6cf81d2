"""The backward pass of causal attention by bf16 instructions, with factors rounded to bf16.

`tile_amx` computes the products on CPUs with AMX, and `tile_bf16` on others with AVX512_BF16.
`attend_backward` is the fp32 version and calls this one if it can. Scores are computed twice: with
queries as rows for the gradients of queries, and with keys as rows for the gradients of keys and
values. Transposing them would take longer. Queries, keys, values, the incoming gradient, the
softmax weights and their gradients are rounded to bf16; sums are fp32. A sequence is processed in
blocks of 32 rows. K must be a multiple of 32.

Shapes as in `attend_backward`; Tp is T rounded up to a multiple of 32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types
from numba.extending import intrinsic

from slipstream.kernels.avx512 import exp, load, store_bf16
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
from slipstream.kernels.processor import NO_BF16_BACKWARD, has_avx512_bf16, is_intel, is_set
from slipstream.kernels.product_amx import USE_AMX
from slipstream.kernels.tile import PANEL
from slipstream.kernels.tile_amx import (
    MOST_ROWS,
    PAIRS,
    configure,
    release,
    round_16_lanes,
    two_panels_amx,
)
from slipstream.kernels.tile_bf16 import panels_bf16

USE_BF16 = USE_AMX or (has_avx512_bf16() and not is_intel() and not is_set(NO_BF16_BACKWARD))
"""Whether this version is used. With Intel's AVX512_BF16 it is not faster than the fp32 version."""

ROWS = MOST_ROWS
"""Number of rows of a block. Head widths must be multiples of it."""

_NEVER = np.float32(1e30)
"""The logarithm of the denominator for a padding row, which makes its weights zero."""

_U, _16 = np.uint32, np.uint32(16)


@kernel
def _to_bf16(source, step, rows, T, Tp, K):
    """Round T rows, `step` bytes apart, to contiguous rows of bf16, with zeros up to Tp rows."""
    for t in range(T):
        round_16_lanes(source + t * step, rows + 2 * K * t, K)
    rest = carray(halves_at(rows + 2 * K * T), ((Tp - T) * K,))
    for i in range((Tp - T) * K):
        rest[i] = 0


@kernel
def _as_outputs(rows, out, Tp, K):
    """Lay out rows as the weights of 16 outputs per panel: [panel][pair of numbers][row][2]."""
    half = K // 2
    for block in range(Tp // PANEL):
        at = 2 * block * PANEL * K
        a, o = carray(words_at(rows + at), (PANEL, half)), carray(words_at(out + at), (half, PANEL))
        for i in range(half):
            for t in range(PANEL):
                o[i, t] = a[t, i]


@kernel
def _as_inputs(rows, out, Tp, K):
    """Lay out rows as inputs to sum over: [pair of rows][number][2]."""
    for pair in range(Tp // 2):
        at = 4 * pair * K
        a, b = carray(halves_at(rows + at), (K,)), carray(halves_at(rows + at + 2 * K), (K,))
        o = carray(words_at(out + at), (K,))
        for i in range(K):
            o[i] = _U(_U(a[i]) | _U(_U(b[i]) << _16))


@kernel
def _lay_out(source, step, rows, outs, ins, T, Tp, K):
    """Round T rows, `step` bytes apart, to bf16 in all three layouts; without the last if 0."""
    _to_bf16(source, step, rows, T, Tp, K)
    _as_outputs(rows, outs, Tp, K)
    if ins:
        _as_inputs(rows, ins, Tp, K)


@kernel
def _numbers_of(grads, outs, row_step, logs, log_step, mass, along, T, Tp, K):
    """Compute the dot products of gradients and results of T rows, and copy `logs` to `mass`."""
    m, a = carray(floats_at(mass), (Tp,)), carray(floats_at(along), (Tp,))
    for t in range(T):
        dots(grads + t * row_step, outs + t * row_step, K, 1, along + 4 * t)
        m[t] = carray(floats_at(logs + t * log_step), (1,))[0]
    for t in range(T, Tp):
        m[t] = _NEVER
        a[t] = ZERO


@kernel
def _products(rows, weights, first, count, K, out, step, zeros):
    """Multiply a block of rows by `count` panels from panel `first` on; `count` is even."""
    start = weights + 2 * PANEL * K * first
    if USE_AMX:
        for p in range(0, count, 2):
            two_panels_amx(
                ROWS, rows, 2 * K, start + 2 * PANEL * K * p, 4 * PANEL, 2 * PANEL * K,
                K // 2, out + 4 * PANEL * p, step, 4 * PANEL, 0,
            )  # fmt: skip
    else:
        panels_bf16(
            rows, 2 * K, start, 4 * PANEL, 2 * PANEL * K, 0, count, count, K // 2, zeros, 0, 0,
            out, step, ROWS, 0, False,
        )  # fmt: skip


@kernel
def _sums(weights, step, values, count, K, out, zeros):
    """Compute the sums (32, K) of `count` rows of values, weighted by a block of rows."""
    if USE_AMX:
        for i in range(0, K, 2 * PANEL):
            two_panels_amx(
                ROWS, weights, step, values + 4 * i, 4 * K, 4 * PANEL, count // 2,
                out + 4 * i, 4 * K, 4 * PANEL, 0,
            )  # fmt: skip
    else:
        panels = K // PANEL
        panels_bf16(
            weights, step, values, 4 * K, 4 * PANEL, 0, panels, panels, count // 2, zeros, 0, 0,
            out, 4 * K, ROWS, 0, False,
        )  # fmt: skip


@intrinsic
def _softmax_backward_16_lanes(
    typingctx: Any, scores: Any, dweights: Any, mass: Any, along: Any, weights: Any, dscores: Any
) -> Any:
    """Compute 16 weights exp(scores - mass) and gradients weight * (dweights - along), in bf16.

    All arguments are addresses.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        scores, dweights, mass, along = (load(builder, address) for address in args[:4])
        weight = exp(builder, builder.fsub(scores, mass))
        store_bf16(builder, weight, args[4])
        store_bf16(builder, builder.fmul(weight, builder.fsub(dweights, along)), args[5])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


@kernel
def _zero(out, count):
    """Set `count` bf16 numbers to zero."""
    o = carray(halves_at(out), (count,))
    for j in range(count):
        o[j] = 0


@kernel
def _repeat(number, out):
    """Write the number at an address 16 times."""
    value = carray(floats_at(number), (1,))[0]
    o = carray(floats_at(out), (PANEL,))
    for j in range(PANEL):
        o[j] = value


@kernel
def _over_keys(scores, dweights, step, weights, dscores, first, n, logs, along, room):
    """Compute gradients of the scores, in bf16, of a block of queries over n keys.

    `first` is the first query. The weights are computed, too, but not used. `room` is a buffer for
    32 numbers.
    """
    for r in range(ROWS):
        seen, at, to = first + r + 1, r * step, r * step // 2
        _repeat(logs + 4 * (first + r), room)
        _repeat(along + 4 * (first + r), room + 4 * PANEL)
        for j in range(0, seen, PANEL):
            _softmax_backward_16_lanes(
                scores + at + 4 * j, dweights + at + 4 * j, room, room + 4 * PANEL,
                weights + to + 2 * j, dscores + to + 2 * j,
            )  # fmt: skip
        _zero(dscores + to + 2 * seen, n - seen)


@kernel
def _over_queries(scores, dweights, step, weights, dscores, n, logs, along):
    """Compute weights and gradients of the scores, in bf16, of a block of keys over n queries.

    The first query has the position of the first key.
    """
    for r in range(ROWS):
        at, to = r * step, r * step // 2
        for j in range(r // PANEL * PANEL, n, PANEL):
            _softmax_backward_16_lanes(
                scores + at + 4 * j, dweights + at + 4 * j, logs + 4 * j, along + 4 * j,
                weights + to + 2 * j, dscores + to + 2 * j,
            )  # fmt: skip
        _zero(weights + to, r)
        _zero(dscores + to, r)


@kernel
def _accumulate(block, out, step, rows, K, first):
    """Add the rows of a block to `out`, `step` bytes apart. If `first`, overwrite it instead."""
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
def backward_bf16_part(
    q, keys, values, grad, out, logs, dq, dk, dv, dv_step, starts, slots, B, S, longest, Q, H, K,
    part, parts
):  # fmt: skip
    """Compute one of `parts` parts of `attend_backward.attend_backward`."""
    G = Q // H
    first, place = carray(ints_at(starts), (B + 1,)), carray(ints_at(slots), (B,))
    most = (longest + ROWS - 1) // ROWS * ROWS
    size = 2 * most * K
    # Queries, gradients, keys and values: each as rows, as outputs and (not values) as inputs.
    room = np.empty(LINE + 11 * size, np.uint8)
    q_rows = aligned(room.ctypes.data)
    g_rows, k_rows, v_rows = q_rows + size, q_rows + 2 * size, q_rows + 3 * size
    q_outs, g_outs, k_outs, v_outs = (
        q_rows + 4 * size, q_rows + 5 * size, q_rows + 6 * size, q_rows + 7 * size
    )  # fmt: skip
    q_ins, g_ins, k_ins = q_rows + 8 * size, q_rows + 9 * size, q_rows + 10 * size
    # Not a power of two, because the lines of a column would then share few sets of the CPU cache.
    step = 4 * (most + PANEL)
    block_room = np.empty(LINE + 3 * ROWS * step + 4 * ROWS * K, np.uint8)
    scores = aligned(block_room.ctypes.data)
    dweights = scores + ROWS * step
    weights, dscores = dweights + ROWS * step, dweights + ROWS * step + ROWS * step // 2
    sums = dscores + ROWS * step // 2
    numbers = np.zeros(2 * most + 4 * PANEL, np.float32)
    mass, along = numbers.ctypes.data, numbers.ctypes.data + 4 * most
    repeated, zeros = along + 4 * most, along + 4 * most + 8 * PANEL
    q_step, k_step = Q * K * 4, H * K * 4
    if USE_AMX:
        configure(PAIRS)
    # Neighboring tasks go to different threads, because sequences may be sorted by length.
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
                _products(q_rows + at, k_outs, 0, n // PANEL, K, scores, step, zeros)
                _products(g_rows + at, v_outs, 0, n // PANEL, K, dweights, step, zeros)
                _over_keys(scores, dweights, step, weights, dscores, i, n, mass, along, repeated)
                _sums(dscores, step // 2, k_ins, n, K, sums, zeros)
                _accumulate(sums, dq + (head * K + i * Q * K) * 4, q_step, some, K, True)
                n = Tp - i
                _products(k_rows + at, q_outs, i // PANEL, n // PANEL, K, scores, step, zeros)
                _products(v_rows + at, g_outs, i // PANEL, n // PANEL, K, dweights, step, zeros)
                _over_queries(
                    scores, dweights, step, weights, dscores, n, mass + 4 * i, along + 4 * i
                )
                _sums(dscores, step // 2, q_ins + at, n, K, sums, zeros)
                _accumulate(sums, dk + ((begin + i) * H + h) * K * 4, k_step, some, K, g == 0)
                _sums(weights, step // 2, g_ins + at, n, K, sums, zeros)
                _accumulate(sums, dv + (begin + i) * dv_step + h * K * 4, dv_step, some, K, g == 0)
    if USE_AMX:
        release()
    hold(room)
    hold(block_room)
    hold(numbers)
