"""Matrix products with packed weights: kernels whose every output is one chain of multiply-adds
over the inputs in order, whatever the number of rows.

A weight (N, K) is packed into panels of 16 outputs, [panel][input][output], the last one filled up
with zeros, for `tile` (the scheme of Goto and van de Geijn 2008). In bf16 the two inputs of a pair
stand side by side, [panel][pair][output][2], for `tile_bf16`; the rows that are multiplied are
rounded to bf16, sums and results are fp32. Every argument is an address or a size.
"""

from __future__ import annotations

import numpy as np
from numba import carray
from numba.np.unsafe.ndarray import to_fixed_tuple

from slipstream.kernels.compiling import kernel
from slipstream.kernels.memory import LINE, aligned, floats_at, halves_at, hold, words_at
from slipstream.kernels.numeric import ZERO
from slipstream.kernels.processor import has_matrix_unit
from slipstream.kernels.rows import gate_in_place
from slipstream.kernels.team import for_team, part_count, part_number, run
from slipstream.kernels.tile import PANEL, tile_1x2, tile_2x2, tiles
from slipstream.kernels.tile_amx import MOST_ROWS as MOST_ROWS_AMX
from slipstream.kernels.tile_amx import (
    add_rows,
    add_to_rows,
    configure,
    release,
    round_in_sixteens,
    two_panels_amx,
)
from slipstream.kernels.tile_bf16 import MOST_ROWS, WIDE_FROM, panels_bf16

_AHEAD = 16384
"""Bytes that the weights of a single tile are asked for in advance: a processor's own guesses are
too short for memory that several rows keep busy. Single rows gain nothing."""

_BLOCK = 96
"""Rows whose inputs stay in the cache while panels go by."""

_BLOCK_AMX = 256
"""The same beside the matrix unit, for which panels of fewer rows do not come by fast enough."""

_AHEAD_AMX = 4096
"""Bytes that it asks for weights in advance."""

ROWS_BEYOND = MOST_ROWS_AMX
"""Rows that it may read after the last one."""

BY_MATRIX_UNIT = has_matrix_unit()
"""Whether products of bf16 are its."""

FP32, BF16 = 4, 2
"""Bytes of a packed weight."""


@kernel
def part_of(total, part, parts):
    """Where the share of a part begins and ends."""
    return total * part // parts, total * (part + 1) // parts


@kernel
def product_part(x, panels, bias, out, M, N, K, size, part, parts):
    """See `product`; one of `parts` parts."""
    if size == BF16 and BY_MATRIX_UNIT:
        _amx_part(x, panels, bias, out, M, N, K, part, parts)
    elif size == BF16:
        _bf16_part(x, panels, bias, out, M, N, K, part, parts)
    else:
        _fp32_part(x, panels, bias, out, M, N, K, part, parts)


@kernel
def _fp32_part(x, panels, bias, out, M, N, K, part, parts):
    x_step, panel_step, out_step = 4 * K, 4 * PANEL * K, 4 * N
    total = N // PANEL
    begin, end = total * part // parts, total * (part + 1) // parts
    if 1 <= M <= 2:
        p = begin
        while p + 2 <= end:
            w, b, o = panels + p * panel_step, bias + 4 * PANEL * p, out + 4 * PANEL * p
            if M == 1:
                tile_1x2(x, x_step, w, 4 * PANEL, panel_step, K, b, o, out_step, w + _AHEAD, 64)
            else:
                tile_2x2(x, x_step, w, 4 * PANEL, panel_step, K, b, o, out_step, w + _AHEAD, 64)
            p += 2
        begin = p
    block = 0
    while block < M:
        rows = min(_BLOCK, M - block)
        for p in range(begin, end):
            w, b = panels + p * panel_step, bias + 4 * PANEL * p
            o = out + block * out_step + 4 * PANEL * p
            # Several tiles ask for the next panel, so that memory is read at an even pace.
            ask = w + _AHEAD if rows <= 6 else panels + min(p + 1, total - 1) * panel_step
            tiles(x + block * x_step, x_step, w, 4 * PANEL, K, b, o, out_step, rows, ask, 4 * PANEL)
        block += rows


_U, _H = np.uint32, np.uint16
_HALF, _ODD, _SIXTEEN = _U(0x7FFF), _U(1), _U(16)
_NUMBER, _INFINITE, _QUIET = _U(0x7FFFFFFF), _U(0x7F800000), _U(0x40)


@kernel
def round_to_bf16(x, out, count):
    """fp32 to bf16, to the nearest, of two as near the even one; NaN stays NaN."""
    a, o = carray(words_at(x), (count,)), carray(halves_at(out), (count,))
    for i in range(count):
        upper = _U(a[i] >> _SIXTEEN)
        rounded = _U(_U(a[i] + _U(_HALF + _U(upper & _ODD))) >> _SIXTEEN)
        o[i] = _H(_U(upper | _QUIET) if _U(a[i] & _NUMBER) > _INFINITE else rounded)


@kernel
def widen(halves, out, count):
    """bf16 to fp32."""
    a, o = carray(halves_at(halves), (count,)), carray(words_at(out), (count,))
    for i in range(count):
        o[i] = _U(_U(a[i]) << _SIXTEEN)


@kernel
def _round_in_fp32(x, out, count):
    """fp32 to the nearest bf16, as fp32."""
    halves = np.empty(count, np.uint16)
    round_to_bf16(x, halves.ctypes.data, count)
    widen(halves.ctypes.data, out, count)
    hold(halves)


@kernel
def _bf16_part(x, panels, bias, out, M, N, K, part, parts):
    panel_step, out_step, line = 2 * PANEL * K, 4 * N, 4 * PANEL
    pairs = K // 2
    total = N // PANEL
    begin, end = total * part // parts, total * (part + 1) // parts
    if begin == end:
        return
    wide = WIDE_FROM <= M and total > 1
    size = 4 if wide else 2
    x_step = size * K
    rounded = np.empty(min(M, _BLOCK) * x_step, np.uint8)
    xs = rounded.ctypes.data
    block = 0
    while block < M:
        rows = min(_BLOCK, M - block)
        if wide:
            _round_in_fp32(x + block * 4 * K, xs, rows * K)
        else:
            round_to_bf16(x + block * 4 * K, xs, rows * K)
        o = out + block * out_step
        # Several tiles ask for the next two panels, so that memory is read at an even pace; so do
        # wide ones, whose processors guess less of it.
        ahead = 2 * panel_step if wide or rows > MOST_ROWS else _AHEAD // 2
        panels_bf16(
            xs, x_step, panels, line, panel_step, begin, end, total, pairs, bias, line, o, out_step,
            rows, ahead, wide,
        )  # fmt: skip
        block += rows
    hold(rounded)


@kernel
def _amx_part(x, panels, bias, out, M, N, K, part, parts):
    begin, end = part_of(N // PANEL, part, parts)
    if begin == end:
        return
    rounded = np.empty(LINE + (min(M, _BLOCK_AMX) + MOST_ROWS_AMX) * 2 * K, np.uint8)
    xs = aligned(rounded.ctypes.data)
    block = 0
    while block < M:
        rows = min(_BLOCK_AMX, M - block)
        if K % PANEL:
            round_to_bf16(x + block * 4 * K, xs, rows * K)
        else:
            round_in_sixteens(x + block * 4 * K, xs, rows * K)
        _amx_panels(xs, panels, bias, out + block * 4 * N, rows, N, K, begin, end)
        block += rows
    hold(rounded)


@kernel
def narrow_product_part(x, panels, bias, out, M, N, K, part, parts):
    """`product_part` by the matrix unit, of rows that are bf16, with `ROWS_BEYOND` rows after them
    that may be read."""
    begin, end = part_of(N // PANEL, part, parts)
    block = 0
    while block < M and begin < end:
        rows = min(_BLOCK_AMX, M - block)
        o = out + block * 4 * N
        _amx_panels(x + block * 2 * K, panels, bias, o, rows, N, K, begin, end)
        block += rows


@kernel
def _amx_panels(x, panels, bias, out, rows, N, K, begin, end):
    """Some panels of rows that are bf16: two at a time, of which the last two may be computed
    twice."""
    panel_step, line, total = 2 * PANEL * K, 4 * PANEL, N // PANEL
    beside = panel_step if total > 1 else 0
    sums = np.empty(LINE + MOST_ROWS_AMX * 2 * line, np.uint8)
    room = aligned(sums.ctypes.data)
    configure(K // 2)
    p = begin
    while p < end:
        q = max(min(p, total - 2), 0)
        w, ahead = panels + q * panel_step, _AHEAD_AMX
        m = 0
        while m < rows:
            some = min(MOST_ROWS_AMX, rows - m)
            two_panels_amx(
                some, x + m * 2 * K, 2 * K, w, line, beside, K // 2, room, 2 * line, line, ahead
            )
            add_rows(room, bias + line * q, some, total, out + m * 4 * N + line * q, 4 * N)
            m, ahead = m + some, 0
        p += 2
    release()
    hold(sums)


@kernel
def gated_product_part(x, panels, bias, out, M, W, K, part, parts):
    """silu(gate) * up of the two halves of a product (M, 2W), by the matrix unit: to rows (M, W) of
    bf16. The numbers are those of `product_part` and `rows.gate_part`. K and W multiples of 16."""
    begin, end = part_of(W // PANEL, part, parts)
    if begin == end:
        return
    panel_step, line = 2 * PANEL * K, 4 * PANEL
    beside, bias_beside = W // PANEL * panel_step, 4 * W
    rounded = np.empty(LINE + (min(M, _BLOCK_AMX) + MOST_ROWS_AMX) * 2 * K, np.uint8)
    sums = np.empty(LINE + MOST_ROWS_AMX * 2 * line, np.uint8)
    xs, gates = aligned(rounded.ctypes.data), aligned(sums.ctypes.data)
    ups = gates + MOST_ROWS_AMX * line
    configure(K // 2)
    block = 0
    while block < M:
        rows = min(_BLOCK_AMX, M - block)
        round_in_sixteens(x + block * 4 * K, xs, rows * K)
        for p in range(begin, end):
            w, b, ahead = panels + p * panel_step, bias + line * p, _AHEAD_AMX
            m = 0
            while m < rows:
                some = min(MOST_ROWS_AMX, rows - m)
                two_panels_amx(
                    some, xs + m * 2 * K, 2 * K, w, line, beside, K // 2, gates, line, ups - gates,
                    ahead,
                )  # fmt: skip
                add_to_rows(gates, b, some)
                add_to_rows(ups, b + bias_beside, some)
                gate_in_place(gates, ups, some * PANEL)
                o = out + 2 * ((block + m) * W + PANEL * p)
                for i in range(some):
                    round_in_sixteens(gates + line * i, o + 2 * W * i, PANEL)
                m, ahead = m + some, 0
        block += rows
    release()
    hold(rounded)
    hold(sums)


@for_team
def _product_shared(p):
    product_part(*to_fixed_tuple(carray(p, (8,)), 8), part_number(), part_count())


def product(x: int, panels: int, bias: int, out: int, M: int, N: int, K: int, size: int) -> None:
    """out (M, N) = x (M, K) W^T + bias; N a multiple of 16, `bias` N numbers. Weights of `size`
    bytes: `FP32` or `BF16`; K is even for the latter."""
    work = (M + 3) * N * K // 8 * size // FP32
    run(product_part, _product_shared, (x, panels, bias, out, M, N, K, size), work)


@kernel
def _pack_bf16(weight, panels, N, K, part, parts):
    total = (N + PANEL - 1) // PANEL
    for p in range(total * part // parts, total * (part + 1) // parts):
        out = carray(halves_at(panels + p * PANEL * K * 2), (K // 2, PANEL, 2))
        for j in range(PANEL):
            n = p * PANEL + j
            if n < N:
                row = carray(halves_at(weight + n * K * 2), (K // 2, 2))
                for k in range(K // 2):
                    out[k, j, 0] = row[k, 0]
                    out[k, j, 1] = row[k, 1]
            else:
                for k in range(K // 2):
                    out[k, j, 0] = _H(0)
                    out[k, j, 1] = _H(0)


@for_team
def _pack_bf16_shared(p):
    _pack_bf16(*to_fixed_tuple(carray(p, (4,)), 4), part_number(), part_count())


@kernel
def pack_part(weight, panels, N, K, part, parts):
    """See `pack`; one of `parts` parts, of fp32."""
    total = (N + PANEL - 1) // PANEL
    for p in range(total * part // parts, total * (part + 1) // parts):
        out = carray(floats_at(panels + p * PANEL * K * 4), (K * PANEL,))
        for j in range(PANEL):
            n = p * PANEL + j
            if n < N:
                row = carray(floats_at(weight + n * K * 4), (K,))
                for k in range(K):
                    out[k * PANEL + j] = row[k]
            else:
                for k in range(K):
                    out[k * PANEL + j] = ZERO


@for_team
def _pack_shared(p):
    pack_part(*to_fixed_tuple(carray(p, (4,)), 4), part_number(), part_count())


def pack(weight: int, panels: int, N: int, K: int, size: int) -> None:
    """A weight (N, K) into panels of the same type: `size` bytes, `FP32` or `BF16`."""
    whole, shared = (_pack_bf16, _pack_bf16_shared) if size == BF16 else (pack_part, _pack_shared)
    run(whole, shared, (weight, panels, N, K), N * K)
