"""Products by the matrix unit, of bf16: plain ones, and gates beside what they are for.

Panels as in `product`; rows are rounded to bf16, or are bf16 already. Called by `product` and
`layers` where it is there. Every argument is an address or a size.
"""

from __future__ import annotations

import numpy as np

from slipstream.kernels.avx512 import gate_panel
from slipstream.kernels.compiling import kernel
from slipstream.kernels.memory import LINE, aligned, hold
from slipstream.kernels.numeric import round_to_bf16
from slipstream.kernels.processor import has_matrix_unit
from slipstream.kernels.tile import PANEL
from slipstream.kernels.tile_amx import (
    MOST_ROWS,
    add_rows,
    configure,
    release,
    round_in_sixteens,
    two_panels_amx,
)

BY_MATRIX_UNIT = has_matrix_unit()
"""Whether what multiplies bf16 is the matrix unit."""

_BLOCK = 256
"""Rows whose inputs stay in the cache while panels go by: panels of fewer rows do not come by fast
enough."""

_AHEAD = 4096
"""Bytes that weights are asked for in advance."""

ROWS_BEYOND = MOST_ROWS
"""Rows that may be read after the last one."""


@kernel
def part_of(total, part, parts):
    """Where the share of a part begins and ends."""
    return total * part // parts, total * (part + 1) // parts


@kernel
def product_amx(x, panels, bias, out, M, N, K, begin, end):
    """See `product.product`: some panels of it."""
    rounded = np.empty(LINE + (min(M, _BLOCK) + MOST_ROWS) * 2 * K, np.uint8)
    xs = aligned(rounded.ctypes.data)
    block = 0
    while block < M:
        rows = min(_BLOCK, M - block)
        if K % PANEL:
            round_to_bf16(x + block * 4 * K, xs, rows * K)
        else:
            round_in_sixteens(x + block * 4 * K, xs, rows * K)
        _panels(xs, panels, bias, out + block * 4 * N, rows, N, K, begin, end)
        block += rows
    hold(rounded)


@kernel
def narrow_product_part(x, panels, bias, out, M, N, K, part, parts):
    """`product_part` by the matrix unit, of rows that are bf16, with `ROWS_BEYOND` rows after them
    that may be read."""
    begin, end = part_of(N // PANEL, part, parts)
    block = 0
    while block < M and begin < end:
        rows = min(_BLOCK, M - block)
        o = out + block * 4 * N
        _panels(x + block * 2 * K, panels, bias, o, rows, N, K, begin, end)
        block += rows


@kernel
def _panels(x, panels, bias, out, rows, N, K, begin, end):
    """Some panels of rows that are bf16: two at a time, of which the last two may be computed
    twice."""
    panel_step, line, total = 2 * PANEL * K, 4 * PANEL, N // PANEL
    beside = panel_step if total > 1 else 0
    sums = np.empty(LINE + MOST_ROWS * 2 * line, np.uint8)
    room = aligned(sums.ctypes.data)
    configure(K // 2)
    p = begin
    while p < end:
        q = max(min(p, total - 2), 0)
        w, ahead = panels + q * panel_step, _AHEAD
        m = 0
        while m < rows:
            some = min(MOST_ROWS, rows - m)
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
    rounded = np.empty(LINE + (min(M, _BLOCK) + MOST_ROWS) * 2 * K, np.uint8)
    sums = np.empty(LINE + MOST_ROWS * 2 * line, np.uint8)
    xs, gates = aligned(rounded.ctypes.data), aligned(sums.ctypes.data)
    ups = gates + MOST_ROWS * line
    configure(K // 2)
    block = 0
    while block < M:
        rows = min(_BLOCK, M - block)
        round_in_sixteens(x + block * 4 * K, xs, rows * K)
        for p in range(begin, end):
            w, b, ahead = panels + p * panel_step, bias + line * p, _AHEAD
            m = 0
            while m < rows:
                some = min(MOST_ROWS, rows - m)
                two_panels_amx(
                    some, xs + m * 2 * K, 2 * K, w, line, beside, K // 2, gates, line, ups - gates,
                    ahead,
                )  # fmt: skip
                o = out + 2 * ((block + m) * W + PANEL * p)
                gate_panel(gates, ups, b, b + bias_beside, o, 2 * W, some)
                m, ahead = m + some, 0
        block += rows
    release()
    hold(rounded)
    hold(sums)
