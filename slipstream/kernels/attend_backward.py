"""The backward pass of causal attention over each sequence's own keys, in fp32.

The softmax weights are recomputed from the logarithms of the denominators (Dao et al. 2022,
FlashAttention), head by head, so that a head's data stays in the CPU cache. Future keys are
skipped. A head's five products use `tile`. If bf16 rounding is allowed and the CPU has fast
instructions for bf16, `attend_backward_bf16` computes the same. All arguments are addresses or
sizes.

Shapes: B sequences, M tokens in total, T tokens of one sequence, S key slots, Q query heads, H
key-value heads, G = Q / H, K head width.
"""

from __future__ import annotations

import numpy as np
from numba import carray
from numba.np.unsafe.ndarray import to_fixed_tuple

from slipstream.kernels.attend_backward_bf16 import ROWS as WIDTH_BF16
from slipstream.kernels.attend_backward_bf16 import USE_BF16, backward_bf16_part
from slipstream.kernels.compiling import kernel
from slipstream.kernels.dots import dots
from slipstream.kernels.memory import floats_at, hold, ints_at
from slipstream.kernels.numeric import ZERO, F, exp
from slipstream.kernels.product import pack_part
from slipstream.kernels.team import for_team, part_count, part_number, run
from slipstream.kernels.tile import PANEL, tiles

_BLOCK = PANEL
"""Number of queries whose scores are computed at once, over the keys up to the last of them, in
whole panels. Larger blocks compute more future scores, which slows down short responses."""

_NEGLIGIBLE = F(-60.0)
"""Softmax weights whose logarithm is below this count as zero. Their gradients are far too small to
change any sum. But for keys that no query attends to, they would be subnormal numbers, for which a
CPU takes a hundred times as long."""


@kernel
def _copy(source, source_step, out, out_step, T, K):
    """Copy T rows of K numbers. Rows are `source_step` and `out_step` bytes apart."""
    for t in range(T):
        a = carray(floats_at(source + t * source_step), (K,))
        o = carray(floats_at(out + t * out_step), (K,))
        for i in range(K):
            o[i] = a[i]


@kernel
def _transpose(rows, row_step, out, T, Tp, K):
    """Transpose T rows of K numbers to (K, Tp)."""
    o = carray(floats_at(out), (K * Tp,))
    for t in range(T):
        a = carray(floats_at(rows + t * row_step), (K,))
        for i in range(K):
            o[i * Tp + t] = a[i]


@kernel
def _add_transposed(columns, out, out_step, T, Tp, K, first):
    """Add the transpose of (K, Tp) to T rows of K numbers, `out_step` bytes apart.

    If `first`, the rows are overwritten instead.
    """
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
def _softmax_backward(scores, dweights, step, logs, along, row_step, T):
    """Turn scores into weights, and gradients of weights into gradients of scores, in place.

    Rows are `step` bytes apart. Future keys get zeros up to the end of a block. Rows of `logs` (the
    logarithms of the denominators) are `row_step` bytes apart. `along` has the dot product of each
    row's gradient and result.
    """
    for i in range(T):
        width = (i // _BLOCK + 1) * _BLOCK
        s = carray(floats_at(scores + i * step), (width,))
        d = carray(floats_at(dweights + i * step), (width,))
        mass = carray(floats_at(logs + i * row_step), (1,))[0]
        less = carray(floats_at(along + i * 4), (1,))[0]
        for j in range(i + 1):
            log = s[j] - mass
            weight = exp(log)
            # NaN stays NaN.
            s[j] = ZERO if log < _NEGLIGIBLE else weight
        for j in range(i + 1):
            d[j] = s[j] * (d[j] - less)
        for j in range(i + 1, width):
            s[j] = ZERO
            d[j] = ZERO


@kernel
def _scores(rows, row_step, panels, K, out, step, zeros, T):
    """Multiply every row by the keys up to the end of its block. `panels` are the packed keys."""
    for block in range(0, T, _BLOCK):
        x, some = rows + block * row_step, min(_BLOCK, T - block)
        for p in range((block + _BLOCK) // PANEL):
            w = panels + p * PANEL * K * 4
            to = out + block * step + p * PANEL * 4
            tiles(x, row_step, w, 4 * PANEL, K, zeros, 0, to, step, some, w, 0)


@kernel
def _sum_over_rows(transposed, weights, step, K, out, zeros, T, Tp):
    """Compute the gradients (K, Tp) of keys or values: the weighted sums over all later rows."""
    for j in range(0, T, PANEL):
        w = weights + j * step + j * 4
        tiles(transposed + j * 4, Tp * 4, w, step, T - j, zeros, 0, out + j * 4, Tp * 4, K, w, 0)


@kernel
def _backward_part(
    q, keys, values, grad, out, logs, dq, dk, dv, dv_step, starts, slots, B, S, longest, Q, H, K,
    part, parts
):  # fmt: skip
    """Compute one of `parts` parts of `attend_backward`."""
    G = Q // H
    first, place = carray(ints_at(starts), (B + 1,)), carray(ints_at(slots), (B,))
    Tp = (longest + _BLOCK - 1) // _BLOCK * _BLOCK
    W = (K + PANEL - 1) // PANEL * PANEL
    # Not a power of two, because the lines of a column would then share few sets of the CPU cache.
    step = (Tp + PANEL) * 4
    scores, dweights = np.empty(Tp * step // 4, np.float32), np.empty(Tp * step // 4, np.float32)
    s, d = scores.ctypes.data, dweights.ctypes.data
    size = Tp * W * 4
    # Zeros, because columns beyond K are read but never written.
    room = np.zeros(5 * Tp * W + Tp + PANEL, np.float32)
    k_rows = room.ctypes.data
    k_panels, v_panels = k_rows + size, k_rows + 2 * size
    transposed, result = k_rows + 3 * size, k_rows + 4 * size
    along = k_rows + 5 * size
    zeros = along + Tp * 4
    q_step, k_step = Q * K * 4, H * K * 4
    # Neighboring tasks go to different threads, because sequences may be sorted by length.
    for task in range(part, B * H, parts):
        b, h = task // H, task % H
        begin, T = first[b], first[b + 1] - first[b]
        own = (h * S + place[b]) * K * 4
        _copy(keys + own, K * 4, k_rows, W * 4, T, K)
        pack_part(keys + own, k_panels, T, K, 0, 1)
        pack_part(values + own, v_panels, T, K, 0, 1)
        for g in range(G):
            head = begin * Q + h * G + g
            rows, grads, outs = q + head * K * 4, grad + head * K * 4, out + head * K * 4
            for t in range(T):
                dots(grads + t * q_step, outs + t * q_step, K, 1, along + t * 4)
            _scores(rows, q_step, k_panels, K, s, step, zeros, T)
            _scores(grads, q_step, v_panels, K, d, step, zeros, T)
            _softmax_backward(s, d, step, logs + head * 4, along, Q * 4, T)
            for block in range(0, T, _BLOCK):
                x, n, some = d + block * step, min(block + _BLOCK, T), min(_BLOCK, T - block)
                for i in range(0, W, PANEL):
                    w, to = k_rows + i * 4, result + (block * W + i) * 4
                    tiles(x, step, w, W * 4, n, zeros, 0, to, W * 4, some, w, 0)
            _copy(result, W * 4, dq + head * K * 4, q_step, T, K)
            _transpose(rows, q_step, transposed, T, Tp, K)
            _sum_over_rows(transposed, d, step, K, result, zeros, T, Tp)
            _add_transposed(result, dk + (begin * H + h) * K * 4, k_step, T, Tp, K, g == 0)
            _transpose(grads, q_step, transposed, T, Tp, K)
            _sum_over_rows(transposed, s, step, K, result, zeros, T, Tp)
            _add_transposed(result, dv + begin * dv_step + h * K * 4, dv_step, T, Tp, K, g == 0)
    hold(scores)
    hold(dweights)
    hold(room)


@for_team
def _backward_shared(p):
    _backward_part(*to_fixed_tuple(carray(p, (18,)), 18), part_number(), part_count())


@for_team
def _backward_bf16_shared(p):
    # The compiler must not see instructions that the CPU does not have.
    if USE_BF16:
        backward_bf16_part(*to_fixed_tuple(carray(p, (18,)), 18), part_number(), part_count())


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
    starts: int,
    slots: int,
    B: int,
    S: int,
    longest: int,
    Q: int,
    H: int,
    K: int,
    *,
    work: int,
    bf16: bool = False,
) -> None:
    """Compute the gradients of attention from the gradient `grad` (M, Q, K) of `out`.

    The results are `dq` (M, Q, K), `dk` (M, H, K) and `dv`, whose rows of (H, K) are `dv_step`
    bytes apart. Queries (M, Q, K) are scaled; keys and values are (H, S, K). `logs` (M, Q) are the
    logarithms of the softmax denominators. `starts` (B + 1,) has the first row of each sequence,
    followed by M. `slots` (B,) has the first of the S key slots of each sequence. `longest` is the
    largest T. With `bf16`, the factors of products may be rounded to bf16. `work` is as in
    `team.run`.

    Each thread allocates 8 T^2 bytes for the longest sequence, or 22 T K + 400 T with bf16
    instructions.
    """
    arguments = (
        q, keys, values, grad, out, logs, dq, dk, dv, dv_step, starts, slots, B, S, longest, Q, H, K
    )  # fmt: skip
    if bf16 and USE_BF16 and K % WIDTH_BF16 == 0:
        run(backward_bf16_part, _backward_bf16_shared, arguments, work)
    else:
        run(_backward_part, _backward_shared, arguments, work)
